"""The device behind one execution of a gym server."""

from collections.abc import Mapping

from cua_rl.environments.device import AgentReport, Device, DeviceKind
from cua_rl.environments.gym.client import GymClient
from cua_rl.environments.gym.fields import Evaluation, Execution, GymTaskRef
from cua_rl.types.actions import Action
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import DeviceError, TaskError
from cua_rl.types.json_values import Json


class GymDevice:
    """A gym execution and its device, which is operated if it can be attached to and otherwise only evaluated."""

    def __init__(self, client: GymClient, task: GymTaskRef, execution: Execution, device: Device | None) -> None:
        self._client = client
        self._device = device
        self._is_closed = False
        self._report = AgentReport()
        self.task = task
        self.execution = execution

    @property
    def device_id(self) -> str:
        return self.execution.device_id or self.execution.execution_id

    @property
    def kind(self) -> DeviceKind:
        return self._device.kind if self._device is not None else "android"

    @property
    def address(self) -> Mapping[str, str]:
        """As gbox-mini-agent takes it."""
        return {
            "type": "genv",
            "gymBaseUrl": self.task.base_url,
            "gymId": self.task.gym_id,
            "executionId": self.execution.execution_id,
        }

    async def observe(self) -> EncodedImage:
        return await self._attached().observe()

    async def execute(self, action: Action) -> None:
        await self._attached().execute(action)

    async def query(self, name: str) -> str:
        """Only the server knows the state; raises `TaskError`."""
        raise TaskError(f"expected the gym server to evaluate its task, got the query {name!r}")

    def report(self, report: AgentReport) -> None:
        """Store the agent's result for the evaluation."""
        self._report = report

    async def evaluate(self, answer: str | None) -> tuple[Evaluation, Json]:
        """The server's evaluation; raises `TaskError` if there is none."""
        report = self._report if self._report.answer == answer else AgentReport(answer=answer)
        return await self._client.evaluate(self.task, self.execution, report)

    async def close(self) -> None:
        """End the execution; safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._device is not None:
                await self._device.close()
        finally:
            await self._client.terminate(self.task, self.execution)

    def _attached(self) -> Device:
        if self._device is None:
            raise DeviceError(
                f"expected a device that can be operated from here, got {self.device_id!r}, which only the gym server "
                "knows; let gbox-mini-agent work on it (agent=mini_agent), or name the key of its boxes (gbox_api_key)"
            )
        return self._device
