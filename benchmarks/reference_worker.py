"""The official ReFusion implementation, asked over JSON lines; runs under its own Python with its checkout on the path.

None of it is in this repository: its functions are called where they are.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from generate import generate_refusion  # type: ignore[import-not-found]
from qwen3.modeling_qwen3_refusion import Qwen3ForCausalLM, forward_process  # type: ignore[import-not-found]

from benchmarks.worker import Clock, Memory, serve

Micro = list[dict[str, list[int]]]  # documents of a micro-batch: prompt_ids and response_ids


class Official:
    """The model and what is done with it."""

    def load(self, path: str) -> dict[str, Any]:
        """Read a model in fp32."""
        torch.set_num_threads(1)
        self.model = Qwen3ForCausalLM.from_pretrained(path, torch_dtype=torch.float32)
        self.memory = Memory()
        return {"torch": torch.__version__, "attention": self.model.config._attn_implementation}

    def decode(
        self,
        prompts: list[list[int]],
        *,
        new_tokens: int,
        slot_size: int,
        block_size: int,
        slot_threshold: float,
        token_threshold: float,
        eos_token_id: int,
    ) -> list[dict[str, Any]]:
        """Each prompt by itself: tokens, calls of the model, time."""
        self.model.eval()
        answers = []
        for prompt in prompts:
            num_passes = 0

            def count(*_: Any) -> None:
                nonlocal num_passes
                num_passes += 1

            hook = self.model.register_forward_pre_hook(count)
            ids, clock = torch.tensor([prompt]), Clock()
            found, _ = generate_refusion(
                self.model,
                SimpleNamespace(eos_token_id=eos_token_id),
                ids,
                gen_length=new_tokens,
                mask_id=self.model.config.mask_token_id,
                slot_size=slot_size,
                serial_num_blocks=new_tokens // block_size,
                slot_threshold=slot_threshold,
                token_threshold=token_threshold,
            )
            answers.append({**clock.read(), "tokens": found[0, len(prompt) :].tolist(), "passes": num_passes})
            hook.remove()
        return answers

    def enable_checkpointing(self) -> None:
        """Gradient checkpointing, as the official script has it."""
        self.model.gradient_checkpointing_enable()

    def begin_training(self, learning_rate: float) -> None:
        """AdamW, as the official trainer's."""
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, fused=True)

    def train(self, micro_batches: list[Micro], *, seed: int) -> dict[str, float]:
        """One optimizer step over micro-batches; the loss is their mean."""
        random.seed(seed)
        clock, losses, places = Clock(), [], 0
        for documents in micro_batches:
            batch = self._pad(documents)
            loss = self.model(**batch, use_cache=False).loss
            (loss / len(micro_batches)).backward()
            losses.append(loss.item())
            places += batch["input_ids"].numel()
            del loss
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {**clock.read(), "loss": sum(losses) / len(losses), "places": places}

    def forget_peak(self) -> None:
        """Count memory from here on."""
        self.memory = Memory()

    def extra_memory(self) -> int:
        """Bytes that the process has had at most above those at `forget_peak`."""
        return self.memory.extra()

    def loss_and_rows(self, documents: Micro, *, seed: int) -> dict[str, Any]:
        """The official loss and gradient norm of one micro-batch, and the rows that were made of it."""
        batch = self._pad(documents)
        names = ("input_ids", "labels", "is_masked", "p_mask", "response_length", "position_ids")
        random.seed(seed)
        made = forward_process(
            batch["input_ids"], batch["attention_mask"], batch["prompt_lengths"], self.model.config.mask_token_id
        )
        random.seed(seed)
        loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf"))
        self.model.zero_grad()
        rows = {name: tensor.tolist() for name, tensor in zip(names, made)}
        lengths = batch["attention_mask"].sum(1).tolist()
        return {"loss": loss.item(), "gradient_norm": norm.item(), "lengths": lengths, **rows}

    def _pad(self, documents: Micro) -> dict[str, torch.Tensor]:
        """Right-padded rows; labels only tell the model that it is trained."""
        rows = [torch.tensor(item["prompt_ids"] + item["response_ids"]) for item in documents]
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(rows, batch_first=True)
        return {
            "input_ids": ids,
            "labels": ids.clone(),
            "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True),
            "prompt_lengths": torch.tensor([[len(item["prompt_ids"])] for item in documents]),
        }


if __name__ == "__main__":
    official = Official()
    serve({name: getattr(official, name) for name in vars(Official) if not name.startswith("_")})
