"""Write a tiny random-weight MoE checkpoint with its tokenizer, for running a real engine on a CPU.

usage: make_tiny_moe.py OUT_DIR [--experts 16] [--top-k 4] [--layers 3] [--dense-layers 0]
       16 experts give uint8 expert ids, 320 give uint16; --dense-layers N makes the first N layers dense.
"""

import argparse
import pathlib

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("out", type=pathlib.Path)
parser.add_argument("--experts", type=int, default=16)
parser.add_argument("--top-k", type=int, default=4)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--dense-layers", type=int, default=0)
args = parser.parse_args()

bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = decoders.ByteLevel()
bpe.train_from_iterator(
    ["a small corpus for a small vocabulary", "0123456789 + - * / = ( ) question answer"] * 50,
    trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ),
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
)
tokenizer.save_pretrained(args.out)

torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=args.layers,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=args.experts,
    num_experts_per_tok=args.top_k,
    decoder_sparse_step=1,
    norm_topk_prob=True,
    mlp_only_layers=list(range(args.dense_layers)),
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=2,
    pad_token_id=0,
    initializer_range=0.2,
)
Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(args.out)
