"""See the README beside this package's folder."""
