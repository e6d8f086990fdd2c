"""Images in the questions of judges: as a judge behind OpenAI's API is sent them, or as words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coalign.data.images.image_files import write_data_url
from coalign.data.images.placeholders import Message, is_image, list_image_parts


def list_images(messages: Iterable[Message]) -> list[str]:
    """List the paths of the images in messages, in order; not those of videos."""
    return [part["image"] for part in list_image_parts(messages) if part["type"] == "image"]


def write_markers(messages: Sequence[Message]) -> list[Message]:
    """Replace the images and videos in messages by `<image>` and `<video>`, for those who read text alone."""
    return [message | {"content": _write_text(message["content"])} for message in messages]


def _write_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(f"<{part['type']}>" if is_image(part) else part.get("text") or "" for part in content)


def send_images(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as OpenAI's API takes them, with the content of each image.

    OSError for a file that is gone, ValueError for a video.
    """
    contents = [message.get("content") for message in messages]
    sent = [[_send_part(part) for part in content] if isinstance(content, list) else content for content in contents]
    return [dict(message) | {"content": content} for message, content in zip(messages, sent, strict=True)]


def _send_part(part: Any) -> Any:
    if not is_image(part):
        return part
    if part["type"] == "video":
        raise ValueError("a judge behind OpenAI's API is sent images, and no videos")
    return {"type": "image_url", "image_url": {"url": write_data_url(part["image"])}}
