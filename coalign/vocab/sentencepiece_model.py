"""The pieces of a SentencePiece model."""

from __future__ import annotations

from pathlib import Path


def pieces(path: Path) -> tuple[list[str], list[str]]:
    """Pieces that stand for text, best first, and those that do not: control, unknown, unused and byte pieces.

    Raises ValueError where the package `sentencepiece` is missing, or the file is no such model.
    """
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as missing:
        raise ValueError(f"{path}: reading a SentencePiece model needs `pip install coalign[vocab]`") from missing
    try:
        model = SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as problem:
        raise ValueError(f"{path} is not a SentencePiece model ({problem})") from problem
    text, control = [], []
    for i in range(len(model)):
        apart = model.is_control(i) or model.is_unknown(i) or model.is_unused(i) or model.is_byte(i)
        (control if apart else text).append(model.id_to_piece(i))
    return text, control
