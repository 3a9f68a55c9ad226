"""What a scheduler could do at best that knew which drafts will be accepted."""

from dspark_lab.hardware.protocol import Floats, HardwareProfile, Ints
from dspark_lab.scheduler.budget import StepCosts, admit, best_budget, survivals, throughputs
from dspark_lab.scheduler.protocol import Confidence, Load
from dspark_lab.validation import checked


class Oracle:
    """As many of the tokens that will be accepted as maximise the step's throughput; no token in vain.

    An upper bound for simulation, and *not* lossless: it ends a request where its next draft would fall, and the token
    that follows would then be drawn from p, not from the residual. (Greedy text stays the target's own.)
    """

    confidence: Confidence = "acceptance"

    @checked
    def __init__(self, *, hardware: HardwareProfile) -> None:
        self.costs = StepCosts(hardware)

    def draft_lengths(self, confidence: Floats | None, load: Load, *, num_draft_tokens: int) -> Ints:
        accepted = survivals(confidence, scheduler="oracle")
        return admit(accepted, best_budget(throughputs(accepted, self.costs(load, num_draft_tokens=num_draft_tokens))))
