"""A Harbor agent that asks the model once and writes its answer into `/app/answer.txt`."""

import os
from pathlib import Path
from typing import override

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from openai import AsyncOpenAI


class AnswerAgent(BaseAgent):
    """Named as `agent.import_path: answer_agent:AnswerAgent`."""

    @staticmethod
    @override
    def name() -> str:
        return "answer"

    @override
    def version(self) -> str:
        return "1"

    @override
    async def setup(self, environment: BaseEnvironment) -> None: ...

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        model = AsyncOpenAI(max_retries=0, timeout=None)
        messages = [{"role": "user", "content": instruction}]
        answer = await model.chat.completions.create(model=os.environ["CUA_MODEL"], messages=messages)
        path = Path(self.logs_dir) / "answer.txt"
        path.write_text(answer.choices[0].message.content or "", encoding="utf-8", errors="replace")
        await environment.upload_file(path, "/app/answer.txt")
