"""Router replay on a real engine: what does it do to the mismatch between engine and trainer?

    python -m bench.router_replay URL CHECKPOINT ROOT

Rolls out by handle from a vLLM at URL that serves CHECKPOINT with the plug-in writing beneath ROOT.
Then, as a trainer does, runs the same tokens through the same weights in transformers, once with the
trainer's own choice of experts and once with the engine's, read through `payload.torch`, and compares
the log-probabilities of the sampled tokens with those the engine sampled them with. Ends with 1 if
replay does not bring them closer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from typing import Any, NamedTuple

import httpx2
import torch
from transformers import AutoModelForCausalLM

from client import generate
from payload import Resolver, decode_segments
from payload import torch as tensors

PROMPT, COMPLETION = 64, 192


class Rollout(NamedTuple):
    """What a trainer gets of one generation."""

    tokens: list[int]
    prompt: int
    logprobs: torch.Tensor  # [completion], the engine's
    payload: list[Any]


async def roll_out(url: str, model: str, payload_dir: str, count: int) -> list[Rollout]:
    """Sample `count` completions by handle."""
    async with httpx2.AsyncClient(base_url=url, timeout=600) as http:

        async def one(seed: int) -> Rollout:
            prompt = random.Random(seed).choices(range(3, 512), k=PROMPT)
            result = await generate(
                client=http,
                model=model,
                prompt_ids=prompt,
                sampling_params={
                    "temperature": 1.0,
                    "top_k": 50,
                    "seed": seed,
                    "max_tokens": COMPLETION,
                    "ignore_eos": True,
                    "extra_args": {"payload_dir": payload_dir},
                },
            )
            logprobs = torch.tensor(result["completion_logprobs"])
            tokens = prompt + result["completion_ids"]
            return Rollout(tokens, len(prompt), logprobs, decode_segments(result["payload"]))

        return list(await asyncio.gather(*map(one, range(count))))


class Replay:
    """Lets a model choose its experts, or forces those of a rollout on it.

    The weights of the forced experts are still the trainer's: from its router's logits, normalised
    as the model does, so that gradients reach the router.
    """

    def __init__(self, model: Any) -> None:
        self.forced: torch.Tensor | None = None  # [positions, layers, top_k]
        self.chosen: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(model.model.layers):
            if hasattr(layer.mlp, "gate"):  # dense layers route nothing; their slots are zeros
                layer.mlp.gate.register_forward_hook(
                    lambda gate, _, out, number=number: self._route(number, gate, *out)
                )

    def _route(
        self, number: int, gate: Any, logits: torch.Tensor, weights: torch.Tensor, own: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.chosen[number] = own
        if self.forced is None:
            return logits, weights, own
        experts = self.forced[:, number]
        forced = logits.softmax(-1, dtype=torch.float32).gather(-1, experts)
        if gate.norm_topk_prob:
            forced = forced / forced.sum(-1, keepdim=True)
        return logits, forced.to(weights.dtype), experts


def logprobs(model: Any, rollout: Rollout, resolver: Resolver) -> torch.Tensor:
    """Return the trainer's log-probability of each completion token."""
    # The last token is never forwarded: nothing comes after it.
    with torch.no_grad():
        logits = model(torch.tensor([rollout.tokens[:-1]])).logits[0, rollout.prompt - 1 :].float()
    end = len(rollout.tokens)
    kept = resolver.ragged(rollout.payload, "sampling_mask", rollout.prompt, end)
    if kept is not None:  # then the engine's are over what top-k kept
        rows = torch.repeat_interleave(torch.from_numpy(kept.counts))
        allowed = torch.zeros_like(logits, dtype=torch.bool)
        allowed[rows, torch.from_numpy(kept.values.astype("int64"))] = True
        logits = logits.masked_fill(~allowed, float("-inf"))
    sampled = torch.tensor(rollout.tokens[rollout.prompt :])
    chosen: torch.Tensor = logits.log_softmax(-1).gather(-1, sampled[:, None])[:, 0]
    return chosen


def main() -> int:
    """Roll out, train on it twice, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("url")
    parser.add_argument("checkpoint")
    parser.add_argument("root")
    parser.add_argument("--model", default="tiny", help="name the server knows it by")
    parser.add_argument("--rollouts", type=int, default=8)
    args = parser.parse_args()

    rollouts = asyncio.run(roll_out(args.url, args.model, f"{args.root}/v1", args.rollouts))
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.bfloat16).eval()
    replay = Replay(model)
    differences: dict[str, list[torch.Tensor]] = {"own experts": [], "replayed": []}
    other = routed = nbytes = 0
    with Resolver(args.root, verify="checksum") as resolver:
        for rollout in rollouts:
            experts = tensors.window(
                resolver, rollout.payload, "routed_experts", 0, len(rollout.tokens) - 1
            )
            assert experts is not None
            nbytes += experts.nbytes
            ids = tensors.as_index(experts)
            for way, forced in (("own experts", None), ("replayed", ids)):
                replay.forced = forced
                difference = logprobs(model, rollout, resolver) - rollout.logprobs
                differences[way].append(difference)
                if forced is None:
                    for number, own in replay.chosen.items():
                        same = own.sort(-1).values == ids[:, number].sort(-1).values
                        other += int((~same.all(-1)).sum())
                        routed += len(same)

    print(
        f"{len(rollouts)} rollouts, {sum(len(one) for one in differences['replayed'])} sampled tokens, "
        f"{nbytes:,} bytes of routed_experts by handle"
    )
    print(
        f"{other} of {routed} expert sets ({other / routed:.2%}) are not the trainer's own choice"
    )
    print(f"{'':14}{'mean |dlogp|':>14}{'KL estimate':>14}{'max |dlogp|':>14}")
    found = {}
    for way, parts in differences.items():
        d = torch.cat(parts)
        # Of samples of the engine's policy: never negative, and zero only where both agree.
        found[way] = d.abs().mean().item(), (d.exp() - 1 - d).mean().item(), d.abs().max().item()
        print(f"{way:14}{found[way][0]:>14.5f}{found[way][1]:>14.7f}{found[way][2]:>14.4f}")
    closer = all(
        a < b for a, b in zip(found["replayed"][:2], found["own experts"][:2], strict=True)
    )
    print(
        f"replayed / own: {found['replayed'][0] / found['own experts'][0]:.2f} and "
        f"{found['replayed'][1] / found['own experts'][1]:.2f}{'' if closer else ': not closer'}"
    )
    return 0 if closer else 1


if __name__ == "__main__":
    raise SystemExit(main())
