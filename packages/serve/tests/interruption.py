"""Calls that die after some of their work, and the JSON lines that commands read and write."""

import json


class Killed(BaseException):
    pass


def kill_after(patch, owner, name, times):
    """Let ``owner.name`` return ``times`` times; then it dies after its work."""
    real, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        result = real(*args, **kwargs)
        calls.append(name)
        if len(calls) == times:
            raise Killed
        return result

    patch.setattr(owner, name, call)


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]
