import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.config import load
from esper.environment.flops import Costs
from esper.growth import GrowingHost, Mode, Setting
from esper.lifecycle import Blend

IMAGE, TOKENS = torch.zeros(1, 3, 16, 16), torch.zeros(1, 12, dtype=torch.long)
HOSTS = {
    "cifar_baseline": (lambda: load("host/cifar_baseline", resolution=16), IMAGE, "conv_light"),
    "tinystories_small": (lambda: load("host/tinystories_small", vocabulary=257), TOKENS, "mlp_small"),
}


@pytest.mark.parametrize("name", HOSTS)
def test_costs_are_what_torch_counts(name: str) -> None:
    build, example, blueprint = HOSTS[name]
    costs = Costs(build, example)
    growing = GrowingHost(build(), coadapt=True).eval()
    slots = [slot.name for slot in growing.host.slots]
    for slot in slots[:2]:
        growing.graft(slot, blueprint, Blend.ADD, seed=0)
    seeds = {slot: costs.seed(slot, blueprint, Blend.ADD) for slot in slots[:2]}
    on = {slots[0]: Setting(Mode.BLENDED, 1.0), slots[1]: Setting(Mode.BEHIND, 1.0)}

    def counted(settings: dict[str, Setting], backward: bool, start: str | None = None) -> int:
        # torch does not count the CPU's fused attention
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            x = example if start is None else growing(example, settings, None, start).detach()
            before = counter.get_total_flops()
            if backward:
                own, behind = growing.losses(example, settings, lambda output: output.float().mean())
                (own + sum(behind.values())).backward()
            else:
                growing(x, settings, start)
            return counter.get_total_flops() - before

    assert costs.forward(seeds, on) == counted(on, False)
    assert costs.forward(seeds, on, slots[0]) == counted(on, False, slots[0])
    assert costs.probe(seeds, on, [slots[0]]) == counted({}, False, slots[0])
    trained = counted(on, True)
    assert costs.train(seeds, on) == pytest.approx(trained, rel=0.15)  # the first layer has no input gradient
    assert costs.train(seeds, on) >= trained
    alone = counted({slots[0]: on[slots[0]]}, True)
    assert costs.train(seeds, on) - costs.train(seeds, {slots[0]: on[slots[0]]}) == pytest.approx(
        trained - alone, rel=0.15
    )
