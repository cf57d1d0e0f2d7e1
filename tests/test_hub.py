"""Models and memories on a hub: uploaded, downloaded, and refused in one line."""

import subprocess
import sys

import pytest
import torch

from fastweights import memory, nn
from fastweights.errors import HubError
from fastweights.hub import find_folder
from tests.loopback_hub import loopback_hub

constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on this machine, and an empty cache."""
    with loopback_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        yield hub


def same_weights(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_a_layer_goes_to_the_hub_and_comes_back(hub):
    layer = nn.FastWeightsRNN(3, 4, decay=0.5)
    address = layer.push_to_hub("me/layer", token="mine")
    assert address.startswith(f"{hub.address}/me/layer/commit/")
    assert sorted(hub.repositories["me/layer"][-1]) == ["README.md", "config.json", "model.safetensors"]
    loaded = nn.FastWeightsRNN.from_pretrained("me/layer")
    assert same_weights(loaded, layer)
    assert loaded.settings == layer.settings
    asked = len(hub.requests)
    offline = nn.FastWeightsRNN.from_pretrained("me/layer", local_files_only=True)
    assert same_weights(offline, layer)
    assert len(hub.requests) == asked


def test_a_later_commit_is_taken_and_an_earlier_one_by_its_number(hub):
    first, second = nn.IRNN(3, 4), nn.IRNN(3, 4)
    commit = first.push_to_hub("me/layer", token="mine").rpartition("/")[2]
    second.push_to_hub("me/layer", token="mine")
    assert same_weights(nn.IRNN.from_pretrained("me/layer"), second)
    assert same_weights(nn.IRNN.from_pretrained("me/layer", revision=commit), first)


def test_memories_go_to_the_hub_and_come_back(hub):
    store = memory.EpisodicMemory(4, 2)
    store.write(torch.rand(3, 2), torch.tensor([5, 6, 7]), tag="new")
    store.push_to_hub("me/memory", token="mine")
    assert sorted(hub.repositories["me/memory"][-1]) == ["README.md", "memory.log", "memory.safetensors"]
    loaded = memory.EpisodicMemory.from_pretrained("me/memory")
    assert torch.equal(loaded.keys, store.keys)
    loaded.undo("new")
    assert (loaded.values.tolist(), store.values.tolist()) == ([], [5, 6, 7])

    body, head, places = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), 5 * torch.eye(3)
    x = places[:2].repeat(30, 1) + 0.1 * torch.randn(60, 3)
    classifier = memory.AdaptiveClassifier(body, head, classes=["a", "b"])
    classifier.fit(x, ["a", "b"] * 30)
    classifier.add_examples(places[2] + 0.1 * torch.randn(5, 3), "c")
    classifier.push_to_hub("me/classes", token="mine")
    assert b"'a', 'b', 'c'" in hub.repositories["me/classes"][-1]["README.md"]
    same = memory.AdaptiveClassifier.from_pretrained("me/classes", body, head)
    assert torch.equal(same.predict(x).probabilities, classifier.predict(x).probabilities)


def test_what_a_language_model_has_read_goes_to_the_hub_and_comes_back(hub):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    lm = memory.AdaptiveLanguageModel(model, cache=memory.NeuralCache(1000, 50), weights=[0.9, 0.1])
    lm.write(torch.randint(50, (1, 40)))
    lm.push_to_hub("me/books", token="mine", card="# Two books\n")
    assert hub.repositories["me/books"][-1]["README.md"] == b"# Two books\n"
    loaded = memory.AdaptiveLanguageModel.from_pretrained(model, "me/books")
    asked = torch.randint(50, (1, 10))
    assert torch.equal(loaded.score(asked, remember=False), lm.score(asked, remember=False))


def test_the_card_on_the_hub_stays_unless_another_is_given(hub):
    layer = nn.IRNN(3, 4)
    layer.push_to_hub("me/layer", token="mine", card="# Mine\n")
    layer.push_to_hub("me/layer", token="mine")
    assert hub.repositories["me/layer"][-1]["README.md"] == b"# Mine\n"
    layer.push_to_hub("me/layer", token="mine", card="# Another\n")
    assert hub.repositories["me/layer"][-1]["README.md"] == b"# Another\n"


def test_a_plain_card_on_the_hub_names_its_repository_and_follows_the_model(hub):
    nn.FastWeightsRNN(3, 4).push_to_hub("me/layer", token="mine")
    nn.FastWeightsRNN(3, 4, decay=0.5).push_to_hub("me/layer", token="mine")
    card = hub.repositories["me/layer"][-1]["README.md"].decode()
    assert 'model = FastWeightsRNN.from_pretrained("me/layer")' in card
    assert '"decay": 0.5' in card


def test_a_branch_has_a_card_of_its_own(hub):
    nn.FastWeightsRNN(3, 4).push_to_hub("me/layer", token="mine")
    hub.repositories["me/layer@draft"] = list(hub.repositories["me/layer"])
    nn.FastWeightsRNN(3, 4).push_to_hub("me/layer", token="mine", card="# Mine\n")
    layer = nn.FastWeightsRNN(3, 4, decay=0.5)
    layer.push_to_hub("me/layer", token="mine", revision="draft")
    assert b'"decay": 0.5' in hub.repositories["me/layer@draft"][-1]["README.md"]  # a plain one is written again
    assert hub.repositories["me/layer"][-1]["README.md"] == b"# Mine\n"
    assert same_weights(nn.FastWeightsRNN.from_pretrained("me/layer", revision="draft"), layer)
    layer.push_to_hub("me/layer", token="mine", revision="draft", card="# A draft\n")
    nn.FastWeightsRNN(3, 4).push_to_hub("me/layer", token="mine", revision="draft")
    assert hub.repositories["me/layer@draft"][-1]["README.md"] == b"# A draft\n"


def test_what_the_hub_refuses_is_said_in_one_line(hub):
    with pytest.raises(HubError, match=r"there is no folder me/nothing, and it cannot be downloaded: .*401") as refused:
        nn.IRNN.from_pretrained("me/nothing")
    assert "\n" not in str(refused.value)
    with pytest.raises(HubError, match=r"cannot upload to forbidden/layer: .*403"):
        nn.IRNN(3, 4).push_to_hub("forbidden/layer", token="mine")
    with pytest.raises(HubError, match="there is no folder no such folder, and it cannot be downloaded: Repo id"):
        nn.IRNN.from_pretrained("no such folder")
    assert set(hub.repositories) == set()


def test_no_hub_at_all(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(HubError, match="there is no folder me/layer, and it cannot be downloaded"):
        nn.IRNN.from_pretrained("me/layer")


@pytest.mark.parametrize("name", ["./here", "/nowhere/at/all", "~/nothing", "a/b/c"])
def test_a_path_is_no_name_on_the_hub(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubError, match=r"^there is no folder [^,]*$"):
        nn.IRNN.from_pretrained(name)


def test_without_huggingface_hub(tmp_path):
    script = f"""
import sys
sys.modules["huggingface_hub"] = None
from fastweights import memory, nn
from fastweights.errors import HubError
nn.IRNN(3, 4).save_pretrained({str(tmp_path)!r})
nn.IRNN.from_pretrained({str(tmp_path)!r})
for call in (lambda: nn.IRNN.from_pretrained("me/layer"), lambda: nn.IRNN(3, 4).push_to_hub("me/layer")):
    try:
        call()
    except HubError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    needed = "you need huggingface_hub: pip install huggingface_hub"
    assert done.stdout.splitlines() == [
        f"there is no folder me/layer, and to look for it on a hub {needed}",
        f"to upload to me/layer {needed}",
    ]


def test_what_lies_beside_the_model_is_not_downloaded(hub):
    layer = nn.IRNN(3, 4)
    layer.push_to_hub("me/layer", token="mine")
    hub.repositories["me/layer"][-1]["huge.bin"] = b"0" * 1000
    folder = find_folder("me/layer", ("config.json", "model.safetensors"))
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert same_weights(nn.IRNN.from_pretrained("me/layer"), layer)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_names_of_classes_are_no_markup_in_a_card(tmp_path):
    names = ["<script>x</script>", "![](http://elsewhere)", "# one"]
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=names)
    classifier.fit(5 * torch.eye(4)[:3].repeat(20, 1) + torch.randn(60, 4), names * 20)
    classifier.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "<script>" not in card
    assert "![]" not in card
    assert r"&lt;script&gt;x&lt;/script&gt;', '!\[\](http://elsewhere)" in card
