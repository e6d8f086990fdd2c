"""A taskset of verifiers 0.4: sums, played by a loop in this process. Only verifiers' interpreter imports it."""

from __future__ import annotations

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def digits(self, trace) -> float:
        """The share of digits, so that a policy of random weights earns something."""
        said = trace.last_reply
        return sum(letter.isdigit() for letter in said) / max(1, len(said))

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for i in range(8):
            data = SumData(prompt=f"{i}+{i}=", answer=str(2 * i), system_prompt="Say the sum.")
            yield SumTask(data, self.config.task)


class AskTwice(vf.Harness[vf.HarnessConfig]):
    """Asks whether the policy is sure; of odd tasks it also asks for a summary, which is another conversation."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        if data.prompt == "7+7=":
            raise RuntimeError("the harness has crashed")
        for streams in (False, True):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages, stream=streams)
            if streams:
                pieces = [chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices]
                said = "".join(pieces)
            else:
                said = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Are you sure?"}]
        if data.idx % 2:
            asked = [{"role": "user", "content": f"Summarise: {prompt}"}]
            await client.chat.completions.create(model=ctx.model, messages=asked)
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["AskTwice", "Sums"]
