"""`fastweights adapt`: a tiny model with a tokenizer in a folder, or as a file of llama.cpp, and texts beside it."""

import math
import random
import re
import shutil
from typing import Any

import pytest
import torch
import transformers

from fastweights import commands, memory
from fastweights.cli import main
from fastweights.commands.adapt import (
    _describe_passage,
    adapt_to_texts,
    continue_text,
    read_texts,
)
from fastweights.errors import DataError, FastWeightsError
from fastweights.evaluation import evaluate_dynamically, perplexity
from fastweights.memory.language_model.loading import load_language_model
from tests.memory.language_models import CLASSES, make_model

STORY = "the cat sat on the mat and the dog sat on the cat . then the dog ate the mat and the cat ran . "
TOKENS = 3 * 4 * len(STORY.split())  # of `texts`


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of words with its tokenizer, as `save_pretrained` writes them."""
    import tokenizers
    import transformers

    words = ["<unk>", "<s>", "</s>", *sorted(set(STORY.split()))]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("model")
    fast: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    fast.save_pretrained(path)
    make_model().save_pretrained(path)
    return path


@pytest.fixture
def texts(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(3):
        (texts / f"{number}.txt").write_text(STORY * 4)
    return texts


def test_texts_are_told_better_and_the_memory_continues_them(folder, texts, tmp_path, capsys):
    words = ["adapt", str(folder), "--text", str(texts), "--context", "16"]
    assert main([*words, "--save", str(tmp_path / "memory"), "--output", str(tmp_path / "page")]) == 0
    output = capsys.readouterr().out
    plain, adapted = map(float, re.search(r"perplexity ([\d.]+) without memories and\s+([\d.]+)", output).groups())  # type: ignore[union-attr]
    assert adapted < plain / 2
    assert "NO" not in output.split()
    page = (tmp_path / "page" / "index.html").read_text()
    assert "add up to one" in page
    assert "<svg" in page
    # What was remembered is the text, and the most likely continuation is the text's.
    model, _ = load_language_model(str(folder))
    lm = memory.AdaptiveLanguageModel.from_pretrained(model, tmp_path / "memory")
    assert len(lm.store) == TOKENS - 1  # each that follows another
    lm.detach()
    prompt = "the cat sat on the mat and the dog sat on"
    assert main(["adapt", str(folder), "--memory", str(tmp_path / "memory"), "--prompt", prompt, "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith(f"{prompt} the cat")


def test_files_of_other_endings_are_read_where_they_are_asked_for(folder, texts, tmp_path, capsys):
    (texts / "more.log").write_text(STORY * 12)
    words = ["adapt", str(folder), "--text", str(texts), "--context", "16", "--output", str(tmp_path / "page")]
    assert main([*words, "--suffix", ".log"]) == 0
    assert f"{texts}, 1 file, 3 left out" in " ".join(capsys.readouterr().out.split())


def test_a_line_that_was_read_comes_again_where_copies_are_made(folder, tmp_path, capsys):
    words, draw = sorted(set(STORY.split())), random.Random(0)
    lines = [[draw.choice(words) for _ in range(12)] for _ in range(30)]
    texts = tmp_path / "lines.txt"
    texts.write_text("\n".join(map(" ".join, lines)))
    memory = str(tmp_path / "memory")
    assert main(["adapt", str(folder), "--text", str(texts), "--save", memory, "--output", str(tmp_path / "page")]) == 0
    recalled = {0: 0, 4: 0}
    for line in lines[20:]:
        for copy_after in recalled:
            prompt = ["--prompt", " ".join(line[:6]), "--tokens", "6", "--copy-after", str(copy_after)]
            capsys.readouterr()
            assert main(["adapt", str(folder), "--memory", memory, *prompt]) == 0
            recalled[copy_after] += capsys.readouterr().out.split() == line
    assert recalled[4] == 10 > recalled[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_follow_the_text_tell_it_better_than_weights_that_stay(dtype, folder, texts, tmp_path, capsys):
    model, tokenizer = load_language_model(str(folder))
    model.to(dtype).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    found = adapt_to_texts(str(tmp_path / "model"), texts, context=16, dynamic=True)
    assert found.following is not None
    assert found.following.perplexity < 0.9 * found.plain
    # The weights follow the first fifth too, which is not among the scores.
    text = torch.tensor(tokenizer(read_texts(texts)[0])["input_ids"])
    rate, bos = found.following.learning_rate, tokenizer.bos_token_id
    scores = evaluate_dynamically(model.float(), text, learning_rate=rate, segment=128, context=16, bos_token_id=bos)
    assert perplexity(scores[found.fitted_tokens :]) == pytest.approx(found.following.perplexity, rel=1e-5)
    words = ["adapt", str(tmp_path / "model"), "--text", str(texts), "--context", "16", "--dynamic"]
    assert main([*words, "--output", str(tmp_path / "page")]) == 0
    assert f"follow the text: {found.following.perplexity:.2f}, " in " ".join(capsys.readouterr().out.split())
    assert "Dynamic evaluation" in (tmp_path / "page" / "report.md").read_text()
    assert adapt_to_texts(str(tmp_path / "model"), texts, context=16).following is None


def test_perplexity_falls_as_it_reads(folder, texts):
    found = adapt_to_texts(str(folder), texts, context=16)
    assert found.parts[-1].adapted < found.parts[-1].plain / 2
    assert found.certificate.passed
    assert sum(found.weights.values()) == pytest.approx(1)
    assert len(found.words) == len(found.bits)
    # The fifth that settings are fitted on is not scored, and eight parts are what is.
    assert found.fitted_tokens == found.parts[0].first == TOKENS // 5
    assert [part.last for part in found.parts] == [*(part.first for part in found.parts[1:]), TOKENS - 1]
    assert len(found.parts) == 8
    lengths = [part.last - part.first for part in found.parts]
    for name in ("plain", "adapted"):
        logs = [length * math.log(getattr(part, name)) for length, part in zip(lengths, found.parts, strict=True)]
        assert sum(logs) / sum(lengths) == pytest.approx(math.log(getattr(found, name)))


def test_the_certificate_is_of_a_part_near_the_end_before_it_is_read(folder, texts, monkeypatch):
    monkeypatch.setattr(commands.adapt, "_PIECE", 32)
    found = adapt_to_texts(str(folder), texts, context=16)
    (detail,) = (check.detail for check in found.certificate.checks if check.name == "the memory is as it was")
    assert TOKENS - 2 * 32 <= int(detail.split()[0]) < TOKENS - 32


def test_a_file_of_llama_cpp_is_read(folder, texts, tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    write_gguf(gguf, path)
    found = adapt_to_texts(str(path), texts, context=16)
    assert found.adapted < found.plain
    assert found.certificate.passed
    assert set(found.words[1:-1]) <= set(STORY.split())  # although a token is decoded without the space before it


def test_a_passage_is_told_in_whole_letters():
    class Bytes:
        def decode(self, ids, **options):
            return bytes(ids.tolist()).decode(errors="replace")

    ids = torch.tensor(list("one \u201ctwo\u201d\nthree".encode()))
    words, bits = _describe_passage(Bytes(), ids, torch.ones(len(ids)))
    assert words == ["one", "\u201ctwo\u201d", "\u21b5", "three"]
    assert sum(bits) == len(ids)


def write_gguf(gguf, path):
    """Write a Llama of one layer with a tokenizer of pieces, as llama.cpp converts them."""
    pieces = ["<unk>", "<s>", "</s>", "\u2581", *(f"\u2581{word}" for word in sorted(set(STORY.split())))]
    pieces += [chr(letter) for letter in range(97, 123)] + ["."]
    width, inner, generator = 32, 64, torch.Generator().manual_seed(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // 2)
    writer.add_vocab_size(len(pieces))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([-float(index) for index in range(len(pieces))])
    writer.add_token_types([2, 3, 3] + [1] * (len(pieces) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    shapes = {"token_embd": (len(pieces), width), "output": (len(pieces), width)}
    shapes |= {f"blk.0.attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (inner, width), "blk.0.ffn_up": (inner, width), "blk.0.ffn_down": (width, inner)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", (0.3 * torch.randn(shape, generator=generator)).numpy())
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", torch.ones(width).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{folder}"], "--text FOLDER"),
        (["{folder}", "--text", "{texts}", "--prompt", "a"], "--text FOLDER"),
        (["{folder}", "--text", "{empty}"], "there are no texts"),
        (["{folder}", "--text", "{empty}/short.text"], "cannot be read"),
        (["no/such/model", "--text", "{empty}/short.text"], "cannot be read"),  # texts are looked at first
        (["{empty}", "--text", "{texts}"], "no config.json"),
        (["no/such/model", "--text", "{texts}"], "there is no folder"),
        (["nowhere.gguf", "--text", "{texts}"], "there is no file"),
        (["{folder}", "--text", "{texts}", "--save", "{texts}/0.txt"], "is not a folder"),
        (["{folder}", "--text", "{texts}", "--output", "{texts}/0.txt"], "is not a folder"),
        (["no/such/model", "--memory", "{empty}", "--prompt", "the cat"], "--save"),
        (["no/such/model", "--text", "{texts}", "--save", "{texts}/0.txt/memory"], "cannot be written"),
        (["no/such/model", "--text", "{texts}", "--output", "{texts}/0.txt/page"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(words, message, folder, texts, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    places = {"folder": folder, "texts": texts, "empty": empty}
    assert main(["adapt", *(word.format(**places) for word in words)]) == 1
    assert message in capsys.readouterr().err


def test_a_short_text_and_an_empty_prompt_are_refused(folder, texts, tmp_path):
    (tmp_path / "short.txt").write_text("the cat sat")
    with pytest.raises(FastWeightsError, match="at least 250"):
        adapt_to_texts(str(folder), tmp_path / "short.txt")
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(FastWeightsError, match="white space"):
        adapt_to_texts("no/such/model", tmp_path / "blank.txt")
    adapt_to_texts(str(folder), texts, context=16, save=tmp_path / "memory")
    with pytest.raises(FastWeightsError, match="empty"):
        continue_text("no/such/model", tmp_path / "memory", "", 3)


@pytest.mark.parametrize(
    ("contents", "words"),
    [(b"the caf\xe9", "byte 7 is not UTF-8"), (STORY.encode("utf-16"), "UTF-8"), (STORY.encode("utf-16-le"), "UTF-16")],
)
def test_what_is_no_text_is_refused(contents, words, tmp_path):
    (tmp_path / "wrong.txt").write_bytes(contents)
    with pytest.raises(DataError, match=words):
        read_texts(tmp_path)


def test_a_text_is_read_without_a_mark_of_its_bytes_and_without_the_card_of_a_memory(folder, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (tmp_path / "README.md").write_text("three")
    assert read_texts(tmp_path)[0] == "three\n\none\ntwo"
    memory.AdaptiveLanguageModel(load_language_model(str(folder))[0]).save_pretrained(tmp_path / "memory")
    assert read_texts(tmp_path)[0] == "three\n\none\ntwo"


def test_a_context_is_what_the_model_can_read_and_may_be_short(folder, texts):
    assert adapt_to_texts(str(folder), texts, context=1).certificate.passed
    found = adapt_to_texts(str(folder), texts, context=100_000)
    assert found.context == 64
    assert found.certificate.memory_bytes > 100_000  # of what it has read
    assert f"{found.certificate.checks[-2].detail.split()[0]}" != "0"  # with a memory that is not empty


def test_a_prompt_must_leave_room_in_the_model(folder, texts, tmp_path):
    path = save_beside(folder, tmp_path / "gpt2", make_model("gpt2"))
    adapt_to_texts(path, texts, context=16, save=tmp_path / "memory")
    assert continue_text(path, tmp_path / "memory", "the cat", 62)
    with pytest.raises(FastWeightsError, match="reads 64 at most"):
        continue_text(path, tmp_path / "memory", "the cat", 63)


def test_a_model_that_sees_the_future_gets_no_certificate(folder, texts, tmp_path, capsys):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=CLASSES, max_position_embeddings=64, **small)
    path = save_beside(folder, tmp_path / "bert.5", transformers.BertLMHeadModel(config))
    assert main(["adapt", path, "--text", str(texts), "--output", str(tmp_path / "page")]) == 1
    assert "not true: another future changes no earlier score" in capsys.readouterr().err
    assert "refused" in (tmp_path / "page" / "index.html").read_text()


def test_the_page_has_the_models_whole_name(folder, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save_beside(folder, tmp_path / "model-0.5b", make_model())
    assert main(["adapt", path, "--text", str(texts), "--context", "16"]) == 0
    assert "<h1>model-0.5b, adapted" in (tmp_path / "runs" / "adapt" / "model-0.5b" / "index.html").read_text()


def save_beside(folder, place, model):
    """Save another model with the same tokenizer."""
    shutil.copytree(folder, place, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.save_pretrained(place)
    return str(place)


def test_other_models_are_refused_in_one_line(folder, texts, tmp_path):
    t5 = {"vocab_size": CLASSES, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    not_finite = make_model()
    torch.nn.init.constant_(not_finite.model.norm.weight, math.inf)
    models = {
        "encoder-decoder": transformers.T5ForConditionalGeneration(transformers.T5Config(**t5)),
        "no weights for lm_head.weight": make_model().model,
        "not finite": not_finite,
        "trained with": make_model(vocab_size=5),
    }
    for words, model in models.items():
        with pytest.raises(FastWeightsError, match=words):
            adapt_to_texts(save_beside(folder, tmp_path / words, model), texts)
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF damaged")
    with pytest.raises(FastWeightsError, match="cannot load"):
        load_language_model(str(tmp_path / "damaged.gguf"))


def test_a_memory_of_another_model_is_refused_before_anything_is_read(folder, texts, tmp_path):
    adapt_to_texts(str(folder), texts, context=16, save=tmp_path / "memory")
    other = save_beside(folder, tmp_path / "other", make_model(seed=1))
    with pytest.raises(FastWeightsError, match="another model"):
        continue_text(other, tmp_path / "memory", "the cat", 3)
    with pytest.raises(FastWeightsError, match="another model"):
        adapt_to_texts(other, texts, context=16, save=tmp_path / "memory")
