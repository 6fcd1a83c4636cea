"""When flights want to be woken: a heap with one alarm at or before each flight's time."""

import heapq
from collections.abc import Iterator, Mapping

from pd_cluster.ids import RequestId
from router.flight import Flight


class Alarms:
    """Alarms of flights that have ended stay until they are due or outnumber the living."""

    def __init__(self, flights: Mapping[RequestId, Flight]) -> None:
        self._flights = flights
        self._heap: list[tuple[float, RequestId]] = []

    def keep(self, flight: Flight) -> None:
        """Call whenever `flight.wake_s` may have become earlier."""
        if flight.done:
            return
        wake_s = flight.wake_s
        if flight.alarm_s is None or wake_s < flight.alarm_s:
            flight.alarm_s = wake_s
            heapq.heappush(self._heap, (wake_s, flight.id))

    def due(self, now_s: float) -> Iterator[Flight]:
        """Flights to be woken now, each of which is kept again afterwards."""
        while self._heap and self._heap[0][0] <= now_s:
            _, request_id = heapq.heappop(self._heap)
            flight = self._flights.get(request_id)
            if flight is None:
                continue
            flight.alarm_s = None
            if flight.wake_s <= now_s:
                yield flight
            self.keep(flight)
        if len(self._heap) > 4 * len(self._flights) + 1000:
            self._heap = [alarm for alarm in self._heap if alarm[1] in self._flights]
            heapq.heapify(self._heap)
