"""The Hugging Face Hub: a checkpoint directory as a repository. Nothing is fetched or sent unless it is asked for."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import UserError, WeightsError, first_line
from ..factory import load
from ..model import AdaptiveViT
from . import format as checkpoint
from . import model_card

if TYPE_CHECKING:
    from huggingface_hub import HfApi

READ = ("config.json", "model.safetensors")
_LIBRARY: dict[str, Any] = {"library_name": "adaptivit", "library_version": __version__}


def from_pretrained(
    name: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
    allow_nonfinite: bool = False,
) -> AdaptiveViT:
    """The model of a checkpoint directory, or of a repository on the Hub (user/name), downloaded once.

    revision: a branch, tag or commit. local_files_only: take what was downloaded before, without a request.
    allow_nonfinite as in load.
    """
    if Path(name).is_dir():
        return load(name, allow_nonfinite=allow_nonfinite)
    from huggingface_hub import snapshot_download

    options: Any = {"revision": revision, "token": token, "local_files_only": local_files_only, **_LIBRARY}
    try:
        place = snapshot_download(str(name), allow_patterns=list(READ), **options)
    except Exception as error:  # a dozen kinds: no such name, no access, no network, no disk
        raise WeightsError(f"{name} is no directory, and the Hugging Face Hub gave none ({_kind(error)}).") from None
    return load(place, allow_nonfinite=allow_nonfinite)


def push(
    model: AdaptiveViT,
    repo: str,
    *,
    images: Any = None,
    private: bool | None = None,
    revision: str | None = None,
    message: str = "Checkpoint of adaptivit",
    token: str | None = None,
    **extra: Any,
) -> str:
    """Make the repository (user/name) if there is none, put the checkpoint there in one commit; its address.

    images and extra are those of save_pretrained. A card that somebody else wrote stays.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "checkpoint"
        checkpoint.save(model, place, extra, images, repo)
        api = HfApi(token=token, **_LIBRARY)
        try:
            address = api.create_repo(repo, private=private, exist_ok=True)
            kept = ["README.md"] if _has_own_card(api, address.repo_id, revision) else None
            options: Any = {"revision": revision, "commit_message": message, "ignore_patterns": kept}
            api.upload_folder(repo_id=address.repo_id, folder_path=place, **options)
        except Exception as error:  # as above
            raise UserError(
                f"{repo} could not be sent to the Hugging Face Hub ({_kind(error)}). It takes a token that may write: "
                "hf auth login, or token=..."
            ) from None
    return str(address)


def _kind(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error).rstrip('.')}"


def _has_own_card(api: HfApi, repo: str, revision: str | None) -> bool:
    if not api.file_exists(repo, "README.md", revision=revision):
        return False
    text = Path(api.hf_hub_download(repo, "README.md", revision=revision)).read_text(errors="replace")
    return model_card.MARK not in text
