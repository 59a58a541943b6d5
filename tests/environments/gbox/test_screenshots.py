"""Screenshots as a service may send them."""

from typing import Any, cast

import pytest

from cua_rl.environments.gbox.device import fetch_observation
from cua_rl.types.errors import DeviceError

CUT_OFF = "iVBORw0KGgo="  # the eight bytes with which every PNG begins


@pytest.mark.parametrize("body", [CUT_OFF, "not base64", "", "R0lGODlh"])
async def test_a_broken_screenshot_is_a_fault_of_the_device(body: str) -> None:
    no_service = cast("Any", None)  # everything is in the address
    with pytest.raises(DeviceError):
        await fetch_observation(no_service, "box", f"data:image/png;base64,{body}", None)
