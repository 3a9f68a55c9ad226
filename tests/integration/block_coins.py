"""Two verify steps of six requests by vLLM's interpreted kernels: prints what each accepted. A script: see its test.

Of token 0, always drafted, the first weight is 1/2 and stays it where drafter and target agree, so a step of two
drafts accepts both or none, and a step of one draft, a position later, accepts it by the very coin of the second.
"""

import json

import torch
from triton_cpu_stub.interpreted import lend_log1p  # pyright: ignore[reportMissingImports]

lend_log1p()

from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import (  # pyright: ignore[reportMissingImports] # noqa: E402
    rejection_sample,
)

NUM_REQUESTS = 6
TARGET, DRAFTER = torch.tensor([0.25, 0.75]).log(), torch.tensor([0.5, 0.5]).log()


def num_accepted(target: list[torch.Tensor], drafter: list[torch.Tensor], *, position: int) -> list[int]:
    """Of token 0 drafted in every slot; logits [2] by slot, the target's with a last one for the bonus token."""
    requests, slots = torch.arange(NUM_REQUESTS), torch.arange(len(target))
    _, emitted = rejection_sample(
        torch.stack(target).repeat(NUM_REQUESTS, 1),
        torch.stack(drafter).repeat(NUM_REQUESTS, 1, 1),
        torch.zeros(NUM_REQUESTS * len(target), dtype=torch.int64),
        torch.arange(NUM_REQUESTS + 1, dtype=torch.int32) * len(target),
        (position + slots).repeat(NUM_REQUESTS),
        requests,
        requests.repeat_interleave(len(target)),
        slots.int().repeat(NUM_REQUESTS),
        torch.ones(NUM_REQUESTS),
        requests * 7919 + 1,  # seeds
        len(drafter),
        use_block_verification=True,
    )
    return (emitted - 1).tolist()


if __name__ == "__main__":
    first = num_accepted([TARGET, DRAFTER, TARGET], [DRAFTER, DRAFTER], position=10)
    print(json.dumps([first, num_accepted([TARGET, TARGET], [DRAFTER], position=11)]))
