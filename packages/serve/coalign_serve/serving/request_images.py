"""Images that clients send to a server: held in files while their request is answered."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from coalign.config.schema import ImagesConfig
from coalign.data.images.image_files import ImageFiles
from coalign.data.images.placeholders import REASON
from coalign.data.images.rows import RowImages
from coalign.data.sources import BadRow


class RequestImages(ImageFiles):
    """The images of one request: data URLs, and files below ``settings.root``. Nothing is fetched.

    Files that data URLs become are deleted by ``close``.
    """

    def __init__(self, settings: ImagesConfig) -> None:
        self._uploads = TemporaryDirectory(prefix="coalign-request-")
        self._allowed = None if settings.root is None else Path(settings.root).resolve()
        super().__init__(self._allowed or Path(), settings.max_file_pixels, Path(self._uploads.name))

    @property
    def reader(self) -> RowImages:
        return RowImages(self)

    def close(self) -> None:
        self._uploads.cleanup()

    def _find_path(self, name: str) -> str:
        if self._allowed is None:
            raise BadRow(f"the image {name[:80]}: this server reads no files; send the image as a data URL", REASON)
        path = (self._allowed / name).resolve()  # where links lead, too
        if not path.is_relative_to(self._allowed):
            raise BadRow(f"the image {name[:80]} is not in the folder that this server reads images from", REASON)
        return super()._find_path(str(path))
