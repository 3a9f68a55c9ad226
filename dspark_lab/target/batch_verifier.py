"""The cached forward of several sequences at once that batched speculative decoding verifies with."""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dspark_lab.target.anatomy import dissect, recording
from dspark_lab.target.protocol import VerifyOutput


class HuggingFaceBatchVerifier:
    """A transformers model with one cache for R sequences.

    The cache is rectangular: columns that a sequence does not use (padding, drafts that fell) stay and are masked, and
    columns that none uses are cut off. Positions are counted per sequence.

    Raises:
        ValueError: a target with sliding windows, which transformers counts in columns, or with recurrent layers, whose
            state would take up the padding.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: tuple[int, ...]) -> None:
        self.model, self.layer_ids = model, layer_ids
        self.anatomy = dissect(model)
        self.cache = DynamicCache(config=model.config)
        recurrent = model._is_stateful or not all(layer.is_croppable for layer in self.cache.layers)
        if recurrent or any(self.cache.is_sliding):
            raise ValueError(
                f"a target with {'recurrent layers' if recurrent else 'sliding windows'} cannot be decoded in batches here: "
                "decode one sequence at a time"
            )
        self.used: Tensor | None = None  # bool [R, columns]
        self.num_new = 0

    @torch.no_grad()
    def forward(self, token_ids: Tensor, lengths: Tensor) -> VerifyOutput:
        """Append the first ``lengths`` [R] of ``token_ids`` [R, n] to each sequence: logits [R, n, V], states [R, n, L, H].

        What lies past a sequence's length is padding; its rows of the result mean nothing.
        """
        columns = torch.arange(token_ids.shape[1], device=token_ids.device)
        new = columns < lengths[:, None]
        used = new if self.used is None else torch.cat([self.used, new], dim=1)
        known = used.sum(1, keepdim=True) - new.sum(1, keepdim=True)
        with recording(self.anatomy, self.layer_ids) as recorded:
            output = self.model(
                input_ids=token_ids,
                attention_mask=used.long(),
                position_ids=known + columns,
                past_key_values=self.cache,
                use_cache=True,
            )
        self.used, self.num_new = used, token_ids.shape[1]
        states, last = recorded.take(self.layer_ids)
        return VerifyOutput(output.logits, states, last)

    def keep(self, num_tokens: Tensor) -> None:
        """Of the tokens just appended, each sequence keeps the first ``num_tokens`` [R]."""
        assert self.used is not None
        widest = int(num_tokens.max())
        if widest < self.num_new:
            self.cache.crop(widest - self.num_new)
            self.used = self.used[:, : widest - self.num_new]
        columns = torch.arange(widest, device=num_tokens.device)
        self.used[:, self.used.shape[1] - widest :] &= columns < num_tokens[:, None]

    def select(self, rows: Tensor) -> None:
        """Go on with these sequences only, in this order."""
        assert self.used is not None
        self.cache.batch_select_indices(rows)
        self.used = self.used[rows]
