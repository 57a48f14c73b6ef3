"""Whether a controller carries over to other numbers of slots, where the best possible score is known.

    python benchmarks/oracle_transfer.py            trains five controllers on the oracle with three slots
    python benchmarks/oracle_transfer.py --seeds 1  one controller

Each is then run, without training, in oracles of two and five slots whose seeds have other sizes. The gain of a seed
depends on the relative depth of its slot, as in training. Printed is the share of what can be gained: (score - score
without growth) / (best possible score - score without growth).
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from esper.config import build_vector_env, compose_config
from esper.controllers import Controller, NoGrowth, Policy, PolicyController, known_options, map_weights
from esper.environment import Oracle, TaskOracle
from esper.ppo import LAST, read_checkpoint
from esper.training import build_module, configure_process, train

EPISODES = 64
SIZES = {"norm": 0.05, "conv_light": 1.0, "conv_heavy": 3.0}  # relative to the host; in training 0.02, 1.5 and 4


def make_oracle(slots: int) -> Oracle:
    """The oracle with another number of slots; gains are interpolated over the relative depth."""
    trained = compose_config("run", ["+experiment=oracle"]).environment.gains
    depths = np.arange(1, slots + 1) / (slots + 1)
    gains = {name: np.interp(depths, (0.25, 0.5, 0.75), values).tolist() for name, values in trained.items()}
    overrides = [f"environment.gains.{name}={values}" for name, values in gains.items()]
    overrides += [f"environment.sizes.{name}={size}" for name, size in SIZES.items()]
    names = [f"host.blocks={slots}", "host.pools=0", f"slots.names={[f'block{index + 1}' for index in range(slots)]}"]
    config = compose_config("run", ["+experiment=oracle", f"environment.envs={EPISODES}", *names, *overrides])
    oracle: Oracle = build_vector_env(config)
    return oracle


@torch.no_grad()
def run_episodes(oracle: Oracle | TaskOracle, controller: Controller) -> float:  # type: ignore[type-arg]
    """The mean score of one round."""
    episode_seeds = [oracle.episode_seed("transfer", 0, index) for index in range(oracle.envs)]
    observation, memory = oracle.reset(episode_seeds), controller.begin(episode_seeds)
    for _ in range(oracle.steps):
        action, memory = controller.act(observation, memory)
        observation = oracle.step(action).observation
    return float(oracle.outcome()["score"].mean())


def load_policy(path: Path, oracle: Oracle | TaskOracle, config: DictConfig) -> Policy:
    """A trained policy for another oracle."""
    checkpoint = read_checkpoint(path)
    policy = build_module(config, oracle).policy
    weights = {key.removeprefix("policy."): value for key, value in checkpoint.state_dict.items()}
    policy.load_state_dict(map_weights(checkpoint.metadata.layout, weights, policy))
    policy.known = known_options(checkpoint.metadata.layout, oracle.layout)
    return policy.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="controllers to train")
    parser.add_argument("overrides", nargs="*", help="of the training run")
    options = parser.parse_args()
    configure_process()
    console, table = Console(), Table("seed", "slots", "no growth", "sampled", "greedy", "optimum", "sampled share")
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as directory:
            overrides = ["+experiment=oracle", f"seed={seed}", "logger=none", *options.overrides]
            config = compose_config("run", overrides)
            train(config, Path(directory), Console(quiet=True))
            for slots in (2, 3, 5):
                oracle = make_oracle(slots)
                policy = load_policy(Path(directory) / "checkpoints" / LAST, oracle, config)
                none = run_episodes(oracle, NoGrowth(oracle.space))
                sampled, greedy = (run_episodes(oracle, PolicyController(policy, greedy=g)) for g in (False, True))
                best = oracle.optimum()
                share = (sampled - none) / (best - none)
                numbers = [f"{value:.2f}" for value in (none, sampled, greedy, best)]
                table.add_row(str(seed), str(slots), *numbers, f"{share:.0%}")
    console.print(table)


if __name__ == "__main__":
    main()
