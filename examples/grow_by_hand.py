"""Grow a host by hand: train it, graft a seed, train the seed in isolation, blend it in, fossilise it.

    python examples/grow_by_hand.py                          CIFAR-10, about a minute on one core
    python examples/grow_by_hand.py --data synthetic_images  nothing is downloaded

For comparison, the same host trains on the same batches without a seed first.
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


def make_action(space: ActionSpace, **names: str) -> Tensor:
    """An action for one environment from the option of each head, by name; other heads take their first option."""
    indices = [head.options.index(names.get(head.name, head.options[0])) for head in space.heads]
    return torch.tensor([indices])


def run(options: argparse.Namespace, data: Data, grow: bool) -> None:
    """Train one host, with or without a seed, and print a line per step."""
    with seeded_init(derive_seed("weights", options.seed)):
        host = load_preset(f"host/{options.host}")
    host.slot(options.slot)  # raises if the host has no such slot
    blueprint(host.topology, options.blueprint)  # raises if there is no such blueprint
    model = GrowingHost(host, coadapt=True)
    optimizer = load_preset("optimizer/sgd", model=model)
    stream = data.stream(64, make_generator("data", options.seed))
    names = tuple(slot.name for slot in host.slots)
    space = load_preset("actions/core", slots=names, blueprints=tuple(blueprints(host.topology)))
    rules = load_preset("lifecycle/default", steps=options.steps)
    slots, column = Slots.empty(1, len(names)), names.index(options.slot)
    seed = {"slot": options.slot, "blueprint": options.blueprint, "blend": options.blend}
    ops_by_step = {options.germinate: "GERMINATE", options.fossilize: "FOSSILIZE"} if grow else {}

    variant = "with a seed" if grow else "without a seed"
    print(f"\n{options.host} on {data.name}, {variant}: {count_parameters(host):,} parameters")
    print("batches  stage       alpha  seed's loss - host's loss  accuracy  without the seed")
    for step in range(options.steps):
        slots, events = apply(slots, make_action(space, op=ops_by_step.get(step, "WAIT"), **seed), space, rules)
        if events.into(Stage.GERMINATED)[0, column]:
            model.graft(
                options.slot, options.blueprint, Blend[options.blend], rng_seed=derive_seed("seed", options.seed)
            )
            optimizer.add(options.slot)
        settings = seed_settings(slots, 0, names)
        differences = []
        for batch in range(options.batches):
            x, y = stream.next()
            loss, isolated = model.losses(x, settings, partial(F.cross_entropy, target=y))
            torch.stack([loss, *isolated.values()]).sum().backward()
            optimizer.step((step + batch / options.batches) / options.steps)
            differences += [(seed_loss - loss).item() for seed_loss in isolated.values()]
        accuracy = measure(model, data, settings)
        is_blended = slots.alpha[0, column] > 0
        without = measure(model, data, {}) if is_blended else float("nan")
        stage = Stage(int(slots.stage[0, column])).name
        print(
            f"{(step + 1) * options.batches:>7}  {stage:<10}  {slots.alpha[0, column]:>5.2f}  "
            f"{f'{sum(differences) / len(differences):+.3f}' if differences else '-':>25}  {accuracy:>7.1f}%  "
            f"{f'{without:>6.1f}%' if is_blended else '-':>16}"
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
    parser.add_argument("--steps", type=int, default=20, help="steps of the episode")
    parser.add_argument("--batches", type=int, default=50, help="batches of 64 per step")
    parser.add_argument("--germinate", type=int, default=6, help="step at which the seed germinates")
    parser.add_argument("--fossilize", type=int, default=13, help="step at which the seed is fossilised")
    parser.add_argument("--seed", type=int, default=0, help="random seed of weights and batches")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        data = load_preset(f"data/{options.data}")
        for grow in (False, True):
            run(options, data, grow)
    except (DataError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
