"""tokenizer.json out of the tokenizer fields of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dcut_engines.gguf_file import GgufFile
from dcut_trt.errors import UnknownModel, UnsupportedModel

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # GGUF token types

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The byte-level BPE tokenizer a GGUF file describes, with its control tokens marked special.

    Raises UnknownModel for missing or inconsistent fields, UnsupportedModel for another kind of tokenizer.
    """
    fields = file.metadata
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise UnsupportedModel(f"{file.path}: tokenizer.ggml.model={kind!r}; only byte-level BPE (gpt2) is supported")
    if split not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModel(f"{file.path}: tokenizer.ggml.pre={split!r}; supported are {known}")
    tokens, types = _token_table(file)
    used = [index for index, kind in enumerate(types) if kind != UNUSED]
    vocab = {tokens[index]: index for index in used}
    if len(vocab) != len(used):
        raise UnknownModel(f"{file.path}: tokenizer.ggml.tokens: {len(used) - len(vocab)} tokens are there twice")
    try:
        merges = [_pair(merge) for merge in fields["tokenizer.ggml.merges"]]
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=split in LLAMA3_NAMES)
    except Exception as error:  # the package raises bare Exception for a merge of unknown tokens
        raise UnknownModel(f"{file.path}: tokenizer.ggml.merges: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    if split in QWEN2_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    _add_special_tokens(tokenizer, tokens, types)
    if fields.get("tokenizer.ggml.add_bos_token", split in LLAMA3_NAMES):
        _prepend_bos(tokenizer, file, tokens)
    return tokenizer


def _token_table(file: GgufFile) -> tuple[list[str], list[int]]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    types = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(types, list) or len(tokens) != len(types):
        raise UnknownModel(f"{file.path}: tokenizer.ggml.tokens and token_type are missing or of unequal length")
    return tokens, types


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ValueError(f"{merge!r} is not two tokens")
    return left, right


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    named = list(zip(tokens, types, strict=True))
    special = [AddedToken(token, normalized=False, special=True) for token, kind in named if kind == CONTROL]
    whole = [AddedToken(token, normalized=False, special=False) for token, kind in named if kind == USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(whole)


def _prepend_bos(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    bos_id = file.metadata.get("tokenizer.ggml.bos_token_id")
    if not isinstance(bos_id, int) or not 0 <= bos_id < len(tokens):
        raise UnknownModel(
            f"{file.path}: tokenizer.ggml.bos_token_id={bos_id!r} is no token, yet one is to be prepended"
        )
    bos = tokens[bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, bos_id)]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
# By tokenizer.ggml.pre, the name llama.cpp gives to how text is split before merging.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    **dict.fromkeys(LLAMA3_NAMES, _split(LLAMA3_SPLIT)),
    **dict.fromkeys(QWEN2_NAMES, _split(QWEN2_SPLIT)),
}
