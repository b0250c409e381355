"""Uploads to the Hugging Face hub: `python -m peer.cli.hub FOLDER OWNER/NAME`.

All files come in one commit, so a failed upload leaves the repository as it was, or empty where it is new. Prints the
commit's address, or the reason of a failure with exit code 1, on one line.
"""

from __future__ import annotations

import sys

from peer.ui.text import clean
from protocol.errors import UsageError, first_line


def require(repo: str) -> None:
    """Raises UsageError if the name cannot be a repository's, or without a token."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
        is_whole = repo.count("/") == 1
    except HFValidationError:
        is_whole = False
    if not is_whole:
        raise UsageError(f"--push {clean(repo, 100)}: not the name of a repository; write OWNER/NAME")
    if constants.HF_HUB_OFFLINE:
        raise UsageError(f"--push {repo}: HF_HUB_OFFLINE is set, which forbids it; unset it")
    if not get_token():
        raise UsageError(f"--push {repo}: no token of the hub is here; type hf auth login, or set HF_TOKEN")


def upload(folder: str, repo: str) -> str:
    """Uploads the folder. Returns the commit's address. Raises what the library raises."""
    from huggingface_hub import HfApi

    api = HfApi(library_name="potluck")
    api.create_repo(repo, exist_ok=True)
    return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Model of Potluck").commit_url)


def _reason(error: Exception) -> str:
    response = getattr(error, "response", None)
    if response is None:
        return f"the hub was not reached: {first_line(error)}"
    said = (getattr(error, "server_message", None) or first_line(error)).rstrip(".")
    remedy = ": hf auth login takes a token with the right to write" if response.status_code in (401, 403) else ""
    return f"the hub says {response.status_code} {said}{remedy}"


if __name__ == "__main__":
    try:
        print(upload(*sys.argv[1:]))
    except Exception as error:  # the library raises many kinds
        print(clean(_reason(error), 300))
        sys.exit(1)
