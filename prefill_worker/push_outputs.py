"""What a push machine asks for and says: things to do for the transfer thread, notices for the worker's lead."""

from msgspec import Struct

from pd_cluster.errors import ErrorInfo
from pd_cluster.ids import TransferId
from pd_cluster.transfer.contract import RankEndpoint, Write


class Connect(Struct, frozen=True):
    peer: RankEndpoint


class Disconnect(Struct, frozen=True):
    agent_name: str


class Post(Struct, frozen=True):
    write: Write


class Cancel(Struct, frozen=True):
    transfer_id: TransferId


class RankPushed(Struct, frozen=True, tag="pushed"):
    """All that this rank owes is with the target. `seconds`: from the first post to the last completion."""

    transfer_id: TransferId
    num_bytes: int
    seconds: float


class RankFailed(Struct, frozen=True, tag="failed"):
    """The push will not succeed; RankStopped follows when its writes have ended."""

    transfer_id: TransferId
    error: ErrorInfo


class RankStopped(Struct, frozen=True, tag="stopped"):
    """This rank writes nothing more for the transfer."""

    transfer_id: TransferId


RankNotice = RankPushed | RankFailed | RankStopped
Output = Connect | Disconnect | Post | Cancel | RankNotice
