"""Grow a host by hand: train it, graft a seed, train the seed behind it, blend it in, keep it.

    python examples/grow_by_hand.py                          CIFAR-10, about a minute on one core
    python examples/grow_by_hand.py --data synthetic_images  nothing is downloaded

The same host, on the same batches, is trained a second time without the seed.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.blueprints import blueprint, blueprints
from esper.config import load_preset
from esper.data import Data, DataError
from esper.growth import GrowingHost, SeedSettings, seed_settings
from esper.hosts import count_parameters
from esper.lifecycle import ActionSpace, Blend, SeedMeasurements, Slots, Stage, apply, tick
from esper.rng import derive_seed, make_generator, seeded_init


def measure(model: GrowingHost, data: Data, settings: SeedSettings, split: str = "validation") -> float:
    """Accuracy in percent."""
    model.eval()
    with torch.no_grad():
        hits = sum(int((model(x, settings).argmax(1) == y).sum()) for x, y in data.batches(split, 500))
    model.train()
    return 100 * hits / data.size(split)


def action(space: ActionSpace, **names: str) -> Tensor:
    """One environment's action from the names of its options; heads that are not named do not matter."""
    options = [head.options.index(names.get(head.name, head.options[0])) for head in space.heads]
    return torch.tensor([options])


def run(chosen: argparse.Namespace, data: Data, grow: bool) -> None:
    with seeded_init(derive_seed("weights", chosen.seed)):
        host = load_preset(f"host/{chosen.host}")
    host.slot(chosen.slot)  # these two say so if there is none of that name
    blueprint(host.topology, chosen.blueprint)
    model = GrowingHost(host, coadapt=True)
    optimizer = load_preset("optimizer/sgd", model=model)
    stream = data.stream(64, make_generator("data", chosen.seed))
    names = tuple(slot.name for slot in host.slots)
    space = load_preset("actions/core", slots=names, blueprints=tuple(blueprints(host.topology)))
    rules = load_preset("lifecycle/default", steps=chosen.steps)
    slots, column = Slots.empty(1, len(names)), names.index(chosen.slot)
    seed = {"slot": chosen.slot, "blueprint": chosen.blueprint, "blend": chosen.blend}
    timed = {chosen.germinate: "GERMINATE", chosen.fossilize: "FOSSILIZE"} if grow else {}

    print(
        f"\n{chosen.host} on {data.name}, {'with a seed' if grow else 'alone'}: {count_parameters(host):,} parameters"
    )
    print("batches  stage       alpha  seed's loss - host's loss  accuracy  without the seed")
    for step in range(chosen.steps):
        slots, events = apply(slots, action(space, op=timed.get(step, "WAIT"), **seed), space, rules)
        if events.into(Stage.GERMINATED)[0, column]:
            model.graft(chosen.slot, chosen.blueprint, Blend[chosen.blend], rng_seed=derive_seed("seed", chosen.seed))
            optimizer.add(chosen.slot)
        settings = seed_settings(slots, 0, names)
        promise = []
        for batch in range(chosen.batches):
            x, y = stream.next()
            loss, behind = model.losses(x, settings, partial(F.cross_entropy, target=y))
            torch.stack([loss, *behind.values()]).sum().backward()
            optimizer.step((step + batch / chosen.batches) / chosen.steps)
            promise += [(own - loss).item() for own in behind.values()]
        accuracy = measure(model, data, settings)
        blended = slots.alpha[0, column] > 0
        without = measure(model, data, {}) if blended else float("nan")
        shown = Stage(int(slots.stage[0, column])).name
        print(
            f"{(step + 1) * chosen.batches:>7}  {shown:<10}  {slots.alpha[0, column]:>5.2f}  "
            f"{f'{sum(promise) / len(promise):+.3f}' if promise else '-':>25}  {accuracy:>7.1f}%  "
            f"{f'{without:>6.1f}%' if blended else '-':>16}"
        )
        contribution = torch.full_like(slots.alpha, torch.nan)
        contribution[0, column] = accuracy - without
        health = torch.where(slots.occupied, 1.0, torch.nan)
        slots, _ = tick(slots, SeedMeasurements(contribution=contribution, health=health), space, rules)
    final = measure(model, data, seed_settings(slots, 0, names), "test")
    print(f"test accuracy {final:.1f}% with {count_parameters(model):,} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description="Grow a host by hand.")
    parser.add_argument("--data", default="cifar10", choices=["cifar10", "synthetic_images"])
    parser.add_argument("--host", default="cifar_baseline")
    parser.add_argument("--slot", default="block2")
    parser.add_argument("--blueprint", default="conv_light")
    parser.add_argument("--blend", default="ADD", choices=[blend.name for blend in Blend])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batches", type=int, default=50, help="batches of 64 in a step")
    parser.add_argument("--germinate", type=int, default=6, help="the step at which the seed germinates")
    parser.add_argument("--fossilize", type=int, default=13, help="the step at which it is kept for good")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    try:
        data = load_preset(f"data/{chosen.data}")
        for grow in (False, True):
            run(chosen, data, grow)
    except (DataError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
