"""Wi-Fi and Bluetooth: their pages in Settings, and what the buttons on them do."""

from dataclasses import replace

from cua_rl.environments.phone.simulator.catalog import WIDTH, Toggle
from cua_rl.environments.phone.simulator.controls import Column, button, pill, row, text_field, toggle_row
from cua_rl.environments.phone.simulator.elements import Operate, Push
from cua_rl.environments.phone.simulator.navigation import go_up, leave, subject
from cua_rl.environments.phone.simulator.state import Network, PhoneState


def build_wifi(state: PhoneState, column: Column) -> None:
    """The switch, and the networks within reach while it is on."""
    column.stack(toggle_row(state, Toggle.WIFI, "Use Wi-Fi", label="Use"))
    if not state.is_on(Toggle.WIFI):
        column.add_text("Turn on Wi-Fi to see networks.")
        return
    saved = [network for network in state.system.networks if network.is_saved]
    others = [network for network in state.system.networks if not network.is_saved]
    for heading, networks in (("Known networks", saved), ("Other networks", others)):
        if networks:
            column.add_heading(heading)
        for network in networks:
            column.stack(
                row(
                    f"network:{network.name}",
                    text=network.name,
                    detail=_network_status(state, network),
                    glyph="wifi",
                    paper="#2f6fed" if network.is_saved else "#7a8494",
                    effect=Push(subscreen=f"network:{network.name}"),
                )
            )


def build_network(state: PhoneState, column: Column, name: str) -> None:
    """One network: connect, disconnect, forget, or its password."""
    network = state.system.find_network(name)
    is_connected = state.system.connected_network == network.name
    status = _network_status(state, network)
    column.stack(row("status", label="Status", text=status, glyph="wifi", paper="#2f6fed"))
    if network.is_saved:
        command, label = ("disconnect", "Disconnect") if is_connected else ("connect", "Connect")
        ask = Push(subscreen=f"ask:forget:{network.name}")
        column.add(
            button(label, (12, column.y + 8, 80, 24), Operate(command=command, target=network.name)),
            pill("Forget", (100, column.y + 8, 80, 24), ask),
        )
    elif network.password:
        field = text_field(state, "password", "Password", (12, column.y + 8, WIDTH - 24, 26))
        column.add(replace(field, ink="" if state.focus == "password" else field.ink))
        join = Operate(command="join", target=network.name) if state.draft else None
        column.add(pill("Connect", (12, column.y + 8, 80, 24), join))
    else:
        connect = Operate(command="connect", target=network.name)
        column.add(button("Connect", (12, column.y + 8, 80, 24), connect))


def _network_status(state: PhoneState, network: Network) -> str:
    if state.system.connected_network == network.name:
        return "Connected"
    if network.is_saved:
        return "Saved"
    return "Needs a password" if network.password else "Open"


def build_bluetooth(state: PhoneState, column: Column) -> None:
    """The switch, and the known devices while it is on."""
    column.stack(toggle_row(state, Toggle.BLUETOOTH, "Use Bluetooth", label="Use"))
    if not state.is_on(Toggle.BLUETOOTH):
        column.add_text("Turn on Bluetooth to see devices.")
        return
    column.add_heading("Known devices")
    for name in state.system.bluetooth_devices:
        column.stack(row(f"device:{name}", text=name, glyph="bluetooth", paper="#26348f"))


def operate_network(state: PhoneState, command: str, name: str) -> PhoneState:
    """Connect to a network, leave it, forget it, or join it with the password that was typed."""
    system = state.system
    network = system.find_network(name)
    match command:
        case "disconnect":
            return replace(state, system=replace(system, connected_network=""))
        case "forget":
            forgotten = system.with_network(replace(network, is_saved=False))
            is_connected = system.connected_network == network.name
            connected = "" if is_connected else system.connected_network
            return go_up(replace(state, system=replace(forgotten, connected_network=connected)))
        case "join" if state.draft.strip() != network.password:
            subscreens = (*state.subscreens, f"ask:wrong_password:{network.name}")
            return leave(replace(state, subscreens=subscreens))
        case _:
            saved = system.with_network(replace(network, is_saved=True))
            return leave(replace(state, system=replace(saved, connected_network=network.name)))


def join_network(state: PhoneState) -> PhoneState:
    """Join the network whose password was typed; nothing happens without one."""
    if not state.draft:
        return state
    return operate_network(state, "join", subject(state))
