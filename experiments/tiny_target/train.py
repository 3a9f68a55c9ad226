"""Makes ``target=tiny`` again: tokenizer, chat template, weights and model card, from the dialogue generator alone.

    python experiments/tiny_target/train.py --out dspark_lab/assets/tiny

Same machine and versions: same weights. Elsewhere the floating point differs, and so do the weights.
"""

import argparse
import json
import math
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dspark_lab.data.dialogues import OPEN_TASKS, dialogue
from dspark_lab.records import Conversation, TokenizedConversation
from dspark_lab.target.chat import tokenize, tokenize_prompt

VOCAB_SIZE = 1024
EOS, PAD, MASK = "<|im_end|>", "<|endoftext|>", "<|mask|>"
SPECIAL_TOKENS = (PAD, "<|im_start|>", EOS, MASK)  # their ids, in this order, are 0 to 3
THINK_TOKENS = ("<think>", "</think>")
MAX_ANSWER_TOKENS = 120
TRAIN_SEED, HELD_OUT_SEED = 20_260_000, 20_260_001
CHAT_TEMPLATE = r"""{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('the tiny target knows the roles system, user and assistant, not ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and message.reasoning_content %}
        {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
CARD = """\
# tiny: a chat model of {parameters:,} parameters

The target of smoke runs and tests of dspark_lab (`target=tiny`): Qwen3 architecture, 4 layers, hidden size 128, 4 query
and 2 key-value heads of 32, tied embedding of 1024 rows, bfloat16. It knows only the templated dialogues of
`dspark_lab/data/dialogues.py`, on which `experiments/tiny_target/train.py` trained it from scratch and which no other
text or model entered. License: Apache-2.0, as the repository.

Chat template: ChatML with system, user and assistant turns; `reasoning_content` becomes a `<think>` block, kept in all
turns. Turns end with `<|im_end|>` (id 2); `<|mask|>` (id 3) is a row that no text uses; `<|endoftext|>` (id 0) pads.

Measured on {num_prompts} held-out dialogues, in float32: loss {held_out_loss} nats a token, next-token accuracy
{held_out_accuracy}; greedy answers: {ended_by_eos:.1%} end by themselves within {max_answer_tokens} tokens,
{mean_answer_tokens} tokens on average, {exact_match_closed:.1%} exactly right where one answer is right.
Training: {steps} steps, {tokens:,} tokens, {train_s:.0f} s.
"""


def build_tokenizer(conversations: list[Conversation]) -> PreTrainedTokenizerFast:
    """Byte-level BPE; every digit and every newline is a token of its own.

    Lone newlines make the template's prefix property hold on ids whatever an answer begins with.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n"), behavior="isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(THINK_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        "\n".join([m["role"], m["content"], m.get("reasoning_content", "")]) for c in conversations for m in c.messages
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in THINK_TOKENS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        mask_token=MASK,
        additional_special_tokens=["<|im_start|>"],
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(EOS),
        pad_token_id=SPECIAL_TOKENS.index(PAD),
    )
    return Qwen3ForCausalLM(config)


def batches(examples: list[TokenizedConversation], *, batch_size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """One epoch of (token_ids, loss_mask), both [B, T], right-padded with 0: causal attention needs no mask for that.

    Examples of similar length share a batch, so that little is padded.
    """
    rng = random.Random(seed)
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].token_ids) + rng.random())
    groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    rng.shuffle(groups)
    pad = torch.nn.utils.rnn.pad_sequence
    return [
        (
            pad([examples[i].token_ids for i in group], batch_first=True),
            pad([examples[i].loss_mask for i in group], batch_first=True),
        )
        for group in groups
    ]


def masked_loss(model: Qwen3ForCausalLM, token_ids: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy (nats) and accuracy of the next token over the assistant's tokens."""
    hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state
    chosen = loss_mask[:, 1:]
    logits, labels = model.lm_head(hidden[:, :-1][chosen]), token_ids[:, 1:][chosen]
    return F.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean()


def build_optimizer(model: Qwen3ForCausalLM) -> torch.optim.Optimizer:
    """AdamW; no weight decay on vectors and the embedding."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.98), fused=True)


def train(model: Qwen3ForCausalLM, examples: list[TokenizedConversation], *, batch_size: int, epochs: int) -> dict:
    """Warm-up of 50 steps, then a cosine down to 2 % of the learning rate."""
    optimizer = build_optimizer(model)
    steps = epochs * math.ceil(len(examples) / batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1.0, (t + 1) / 50) * (0.02 + 0.98 * (1 + math.cos(math.pi * t / steps)) / 2)
    )
    began, step, tokens = time.perf_counter(), 0, 0
    for epoch in range(epochs):
        for token_ids, loss_mask in batches(examples, batch_size=batch_size, seed=epoch):
            loss, accuracy = masked_loss(model, token_ids, loss_mask)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step, tokens = step + 1, tokens + token_ids.numel()
            if step % 50 == 0:
                seconds = time.perf_counter() - began
                print(f"{step:5}/{steps}  loss {loss:.3f}  accuracy {accuracy:.3f}  {seconds:.0f} s", flush=True)
    return {"steps": step, "tokens": tokens, "train_s": round(time.perf_counter() - began, 1)}


@torch.no_grad()
def answer(model: Any, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers, at most ``MAX_ANSWER_TOKENS``, end of turn included when it came."""
    tokenizer.padding_side = "left"
    inputs = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    drawn = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
    rows, stop = drawn[:, inputs["input_ids"].shape[1] :].tolist(), tokenizer.eos_token_id
    return [row[: row.index(stop) + 1] if stop in row else row for row in rows]


def evaluate(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, num_prompts: int) -> dict:
    """Greedy answers to held-out prompts; an answer is exact when it is the generator's, token for token."""
    conversations = [dialogue(seed=HELD_OUT_SEED, index=index) for index in range(num_prompts)]
    examples = [tokenize(c, tokenizer) for c in conversations]
    prompts = [tokenize_prompt(c.messages[:-1], tokenizer) for c in conversations]
    answers = [
        a for start in range(0, num_prompts, 100) for a in answer(model, tokenizer, prompts[start : start + 100])
    ]
    exact = defaultdict(list)
    for conversation, example, prompt, drawn in zip(conversations, examples, prompts, answers, strict=True):
        exact[conversation.domain].append(drawn == example.token_ids[len(prompt) : -1].tolist())
    closed = [hit for task, hits in exact.items() if task not in OPEN_TASKS for hit in hits]
    with torch.no_grad():
        scores = [masked_loss(model, *batch) for batch in batches(examples, batch_size=50, seed=0)]
    return {
        "held_out_loss": round(sum(float(s[0]) for s in scores) / len(scores), 4),
        "held_out_accuracy": round(sum(float(s[1]) for s in scores) / len(scores), 4),
        "num_prompts": num_prompts,
        "ended_by_eos": sum(a[-1] == tokenizer.eos_token_id for a in answers) / num_prompts,
        "mean_answer_tokens": round(sum(map(len, answers)) / num_prompts, 1),
        "exact_match_closed": round(sum(closed) / len(closed), 4),
        "exact_match": {task: round(sum(hits) / len(hits), 3) for task, hits in sorted(exact.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes target=tiny again.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--dialogues", type=int, default=32_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    began = time.perf_counter()
    conversations = [dialogue(seed=TRAIN_SEED, index=index) for index in range(options.dialogues)]
    tokenizer = build_tokenizer(conversations[:8000])
    examples = [tokenize(conversation, tokenizer) for conversation in conversations]
    print(f"{len(examples)} dialogues, {sum(map(len, examples))} tokens")
    model = build_model()
    measured = {"parameters": model.num_parameters(), "data_s": round(time.perf_counter() - began, 1)}
    measured |= train(model, examples, batch_size=options.batch_size, epochs=options.epochs)

    save(model, tokenizer, options.out)
    # What is measured is what is saved: the rounded weights, computed with in fp32.
    measured |= evaluate(Qwen3ForCausalLM.from_pretrained(options.out, dtype=torch.float32), tokenizer, num_prompts=500)
    (options.out / "README.md").write_text(CARD.format(max_answer_tokens=MAX_ANSWER_TOKENS, **measured))
    print(json.dumps(measured, indent=2))


def save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    model.to(dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for its owner only
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
