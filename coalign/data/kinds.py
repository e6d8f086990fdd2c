"""What the rows of a data set can become: the names that a recipe's ``source`` may have."""

from __future__ import annotations

from collections.abc import Mapping

from coalign.data.conversations import ConversationSource
from coalign.data.documents import DocumentSource
from coalign.data.examples import Examples
from coalign.data.labelled import LabelledSource
from coalign.data.preferences import PreferenceSource
from coalign.data.prompts import PromptSource
from coalign.data.steps import StepSource

KINDS: Mapping[str, type[Examples]] = {
    "prompts": PromptSource,
    "conversations": ConversationSource,
    "documents": DocumentSource,
    "preferences": PreferenceSource,
    "labelled": LabelledSource,
    "steps": StepSource,
}
