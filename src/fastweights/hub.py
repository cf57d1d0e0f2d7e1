"""Folders that people share: found on this machine or downloaded from a hub of Hugging Face, and uploaded to it."""

import contextlib
import html
import os
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import final

from fastweights.errors import HubError, one_line

CARD = "README.md"
FOLDER = "a folder, or owner/name of a hub"  # in a card, which does not know where it will lie
NOTHING_KNOWN = "Nothing was noted of its training, its data, its scores and its limits."


class Shared(ABC):
    """A base class for models and memories, which are saved to a folder: it uploads the folder to a hub."""

    @abstractmethod
    def save_pretrained(self, folder: str | os.PathLike[str], *, card: str | None = None) -> None:
        """Write it to a folder, with a model card."""

    @final
    def push_to_hub(
        self,
        repo_id: str,
        *,
        card: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        message: str = "Upload with fastweights",
    ) -> str:
        """Upload what `save_pretrained` writes to a hub, in one commit, and return the commit's address.

        The repository is made if there is none. The environment's `HF_ENDPOINT` names another hub than huggingface.co.

        Args:
            repo_id: "owner/name", or "name" of the owner of the token.
            card: the model card; None keeps the one that is there, unless it is a plain one, or writes a plain one.
            private: whether a repository that is made is private; None is the owner's default.
            token: of the hub; None is the one that `hf auth login` has stored.
            revision: the branch; None is the main one.
            message: of the commit.

        Raises:
            HubError: huggingface_hub is not installed, or the hub refuses or cannot be reached; nothing was uploaded.
            FastWeightsError: as `save_pretrained`.
        """
        hub = _import_hub(f"to upload to {repo_id}")
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, card=card)
            with _refusals(f"cannot upload to {repo_id}"):
                api = hub.HfApi(token=token)
                repo: str = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
                kept = []
                if card is None and api.file_exists(repo, CARD, revision=revision):
                    there = Path(api.hf_hub_download(repo, CARD, revision=revision)).parent
                    kept = [CARD] if find_card(there, None, "") is None else []
                written = Path(folder, CARD)
                written.write_bytes(written.read_bytes().replace(FOLDER.encode(), repo.encode()))
                commit = api.upload_folder(
                    repo_id=repo,
                    folder_path=folder,
                    commit_message=message,
                    revision=revision,
                    ignore_patterns=[".*", *kept],  # a memory's lock is of this machine
                )
        return str(commit.commit_url)


def find_folder(
    name: str | os.PathLike[str],
    files: Collection[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Path:
    """Return a folder of this machine as it is, or download some files of the repository of that name from a hub.

    Only a name that is no folder needs huggingface_hub, and a network if the repository is not in its cache.

    Args:
        name: a folder, or "owner/name" on the hub.
        files: names of the files to download, beside the card: a repository may hold far more.
        revision: a branch, tag or commit of the repository; None is the main branch.
        token: of the hub; None is the one that `hf auth login` has stored.
        cache_dir: where downloads are kept; None is huggingface_hub's own folder.
        local_files_only: take what has been downloaded before, without a network.

    Raises:
        HubError: there is no such folder or repository, huggingface_hub is not installed, or the hub refuses or cannot
            be reached.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not isinstance(name, str) or name.startswith((".", "~", "/")) or len(folder.parts) > 2:
        raise HubError(f"there is no folder {folder}")
    missing = f"there is no folder {name}"
    hub = _import_hub(f"{missing}, and to look for it on a hub")
    with _refusals(f"{missing}, and it cannot be downloaded"):
        return Path(
            hub.snapshot_download(
                name,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
                allow_patterns=[CARD, *files],
            )
        )


def write_card(title: str, words: str, code: str, more: str | None = None, *, licence: str | None = None) -> str:
    """Return a model card: what it is, how it is loaded, and what else there is to say, in Markdown.

    Args:
        title: the name of the model or memory in the folder.
        words: a sentence that describes it.
        code: the lines of Python that load it.
        more: the rest, as Markdown; None says that nothing else is known, and the next save replaces such a card.
        licence: an identifier of SPDX such as "apache-2.0", or words; None leaves it out.
    """
    known = "" if licence is None else licence if re.fullmatch("[a-z0-9.-]+", licence) else "other"
    head = "---\nlibrary_name: fastweights\n" + f"license: {known}\n" * bool(known) + "tags:\n- fast-weights\n---\n"
    parts = [f"# {title}", words, f"```python\n{code}\n```", NOTHING_KNOWN if more is None else more.strip()]
    if licence is not None:
        parts.append(f"Licence: {escape(licence)}.")  # a model that was downloaded brings its own
    return head + "".join(f"\n{part}\n" for part in parts)


def escape(text: str) -> str:
    """Return words as Markdown that shows them as they are: names that users give are no markup."""
    escaped = re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
    # An underscore between letters is no markup and stays readable: learning_rate.
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", escaped)


def find_card(folder: Path, card: str | None, plain: str) -> str | None:
    """Return the card that is to be written into a folder: the one given, or a plain one; None if one stays there."""
    if card is not None:
        return card
    path = folder / CARD
    return plain if not path.exists() or NOTHING_KNOWN.encode() in path.read_bytes() else None


def _import_hub(purpose: str) -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise HubError(f"{purpose} you need huggingface_hub: pip install huggingface_hub") from error
    return huggingface_hub


@contextlib.contextmanager
def _refusals(words: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into one line: its own errors, and those of the network and of the disk."""
    try:
        yield
    except Exception as error:
        raise HubError(f"{words}: {one_line(error, lines=4)}") from error
