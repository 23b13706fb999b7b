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


def from_pretrained(
    name: str | Path, *, revision: str | None = None, token: str | None = None, local_files_only: bool = False
) -> AdaptiveViT:
    """The model of a checkpoint directory, or of a repository on the Hub (user/name), which is downloaded once.

    revision: a branch, tag or commit. local_files_only: take what was downloaded before and ask nobody.
    """
    if Path(name).is_dir():
        return load(name)
    from huggingface_hub import snapshot_download

    try:
        place = snapshot_download(
            str(name),
            revision=revision,
            token=token,
            local_files_only=local_files_only,
            allow_patterns=list(READ),
            library_name="adaptivit",
            library_version=__version__,
        )
    except Exception as error:  # a dozen kinds: no such name, no access, no network, no disk
        raise WeightsError(
            f"{name} is no directory, and it could not be had from the Hugging Face Hub "
            f"({type(error).__name__}: {first_line(error).rstrip('.')})."
        ) from None
    return load(place)


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
    """Make the repository (user/name) where there is none, and put the checkpoint there in one commit; its address.

    images and extra are those of save_pretrained.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "checkpoint"
        checkpoint.save(model, place, extra, images, repo)
        api = HfApi(token=token, library_name="adaptivit", library_version=__version__)
        try:
            address = api.create_repo(repo, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=address.repo_id,
                folder_path=place,
                revision=revision,
                commit_message=message,
                ignore_patterns=["README.md"] if _has_own_card(api, address.repo_id, revision) else None,
            )
        except Exception as error:  # as above
            raise UserError(
                f"{repo} could not be sent to the Hugging Face Hub ({type(error).__name__}: "
                f"{first_line(error).rstrip('.')}). It wants a token that may write: hf auth login, or token=..."
            ) from None
    return str(address)


def _has_own_card(api: HfApi, repo: str, revision: str | None) -> bool:
    """Whether somebody wrote the card that is there; it is not replaced then."""
    if not api.file_exists(repo, "README.md", revision=revision):
        return False
    return model_card.MARK not in Path(api.hf_hub_download(repo, "README.md", revision=revision)).read_text(
        errors="replace"
    )
