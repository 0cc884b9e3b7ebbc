"""What the dashboard shows: rows of panels, each a few PromQL queries. Knows metrics, not Grafana's JSON.

`$__rate_interval` is Grafana's variable for the window of a rate: four scrapes at least.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Panel:
    """Queries by the legend of their lines (`{{label}}` is the label's value), in one unit of Grafana's."""

    title: str
    unit: str
    queries: Mapping[str, str]
    note: str
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def rate(metric: str, *by: str) -> str:
    """The metric's growth a second, summed over all but the labels `by`."""
    return f"{_sum(*by)} (rate({metric}[{WINDOW}]))"


def quantile(level: float, histogram: str, *by: str, only: str = "") -> str:
    """A quantile of a histogram over the window, for each value of the labels `by`; `only`: a selector."""
    return f"histogram_quantile({level}, {rate(f'{histogram}_bucket{only}', 'le', *by)})"


def quantiles(histogram: str, only: str = "") -> dict[str, str]:
    """Median, 90th and 99th percentile."""
    return {f"p{level * 100:.0f}": quantile(level, histogram, only=only) for level in (0.5, 0.9, 0.99)}


def share(part: str, whole: str) -> str:
    """One rate as a share of another; 0 while nothing happens."""
    return f"({part}) / clamp_min({whole}, 1e-9)"


def _sum(*by: str) -> str:
    return f"sum by ({', '.join(by)})" if by else "sum"


_STEPS = 'tulip_engine_steps_total{outcome=~"eager|captured|replayed"}'
_REPLAYED = 'tulip_engine_steps_total{outcome="replayed"}'
# Probes and scrapes are requests too, and would hide those of clients.
_CLIENTS = 'route!~"/health|/live|/metrics|/ping"'
_REQUESTS = f"ivy_requests_total{{{_CLIENTS}}}"
_SERVER_ERRORS = f'ivy_requests_total{{{_CLIENTS}, status=~"5.."}}'

ROWS = (
    Row(
        "At a glance",
        (
            Panel(
                "Requests a second",
                "reqps",
                {"": rate(_REQUESTS)},
                "Answered requests of clients, whatever their status; without probes and scrapes.",
                "stat",
                4,
            ),
            Panel(
                "p99 of a request",
                "s",
                {"": quantile(0.99, "ivy_request_seconds", only=f"{{{_CLIENTS}}}")},
                "The whole request inside the gateway, over all routes.",
                "stat",
                4,
            ),
            Panel(
                "Server errors",
                "percentunit",
                {"": share(f"{rate(_SERVER_ERRORS)} or vector(0)", rate(_REQUESTS))},
                "Share of requests answered with a status of 500 or above.",
                "stat",
                4,
            ),
            Panel(
                "Tokens a second",
                "short",
                {"": rate("ivy_tokens_total")},
                "Tokens computed, special tokens included.",
                "stat",
                4,
            ),
            Panel(
                "Replicas ready",
                "none",
                {"": "sum(max by (replica) (ivy_replica_ready))"},
                "Servers that at least one gateway sends work to.",
                "stat",
                4,
            ),
            Panel(
                "Tokens waiting",
                "short",
                {"": "sum(tulip_waiting_tokens)"},
                "Accepted by the servers, not yet dispatched.",
                "stat",
                4,
            ),
        ),
    ),
    Row(
        "Traffic",
        (
            Panel(
                "Requests by route",
                "reqps",
                {"{{route}}": rate("ivy_requests_total", "route")},
                "By route template.",
            ),
            Panel(
                "Answers by status",
                "reqps",
                {"{{status}}": rate("ivy_requests_total", "status")},
                "429 is overload, 503 no replica or a passed deadline.",
            ),
            Panel(
                "Tokens and inputs",
                "short",
                {"tokens": rate("ivy_tokens_total"), "inputs": rate("ivy_inputs_total")},
                "A second. Their ratio is the mean length of an input.",
            ),
            Panel(
                "Requests and connections now",
                "short",
                {"requests": "sum(ivy_requests_in_flight)", "connections": "sum(ivy_connections)"},
                "Requests being answered, and open connections, idle ones included.",
            ),
            Panel(
                "Connections that the gateway ended",
                "ops",
                {"{{reason}}": rate("ivy_connections_ended_total", "reason")},
                "Too slow, too large, too many: clients' mistakes, or an attack.",
            ),
            Panel(
                "Refused: told to wait, p90",
                "s",
                {"p90": quantile(0.9, "ivy_retry_after_seconds")},
                "The Retry-After of 429 answers: how far behind the servers are.",
            ),
        ),
    ),
    Row(
        "Latency",
        (
            Panel(
                "Whole request",
                "s",
                quantiles("ivy_request_seconds", only=f"{{{_CLIENTS}}}"),
                "Inside the gateway, over all routes of clients.",
            ),
            Panel(
                "p99 by phase",
                "s",
                {"{{phase}}": quantile(0.99, "ivy_phase_seconds", "phase")},
                "Parse, tokenize, queue, inference, wire (the rest of a chunk's way), encode; total.",
            ),
            Panel(
                "p99 by route",
                "s",
                {"{{route}}": quantile(0.99, "ivy_request_seconds", "route")},
                "By route template.",
            ),
            Panel(
                "Server: p99 of waiting, by lane",
                "s",
                {"{{lane}}": quantile(0.99, "tulip_queue_seconds", "lane")},
                "From a chunk's arrival to the dispatch of its last sequence.",
            ),
            Panel(
                "Server: computing",
                "s",
                quantiles("tulip_compute_seconds"),
                "From that dispatch until the chunk's last row was on the host.",
            ),
            Panel(
                "Server: p99 of a step, hot and cold",
                "s",
                {"{{kind}}": quantile(0.99, "tulip_step_seconds", "kind")},
                "A cold step compiles or captures. They end soon after a start.",
            ),
        ),
    ),
    Row(
        "Queues",
        (
            Panel(
                "Gateway: admitted tokens by lane",
                "short",
                {"{{lane}}": "sum by (lane) (ivy_queue_tokens)"},
                "Of the requests inside the gateways, waiting or computed.",
            ),
            Panel(
                "Servers: waiting tokens by lane",
                "short",
                {"{{lane}}": "sum by (lane) (tulip_waiting_tokens)"},
                "Accepted, not yet dispatched.",
            ),
            Panel(
                "Servers: seconds of work that wait",
                "s",
                {
                    "{{instance}}": "sum by (instance) (tulip_waiting_tokens) / clamp_min("
                    f"{rate('tulip_batch_tokens_sum', 'instance')}, 1)"
                },
                "Waiting tokens over the tokens dispatched a second. The best single sign of overload.",
            ),
        ),
    ),
    Row(
        "Batches and graphs",
        (
            Panel(
                "Tokens of a batch",
                "short",
                quantiles("tulip_batch_tokens"),
                "Near the saturation point under load, small when idle.",
            ),
            Panel(
                "Sequences of a batch",
                "short",
                quantiles("tulip_batch_sequences"),
                "Many short ones or few long ones: time follows tokens.",
            ),
            Panel(
                "Batches a second",
                "ops",
                {"{{instance}}": rate("tulip_batches_total", "instance")},
                "By server.",
            ),
            Panel(
                "Graph hit rate",
                "percentunit",
                {"{{instance}}": share(rate(_REPLAYED, "instance"), rate(_STEPS, "instance"))},
                "Steps that replayed a captured graph. 0 on a CPU, which has none.",
            ),
            Panel(
                "Steps by outcome",
                "ops",
                {"{{outcome}}": rate("tulip_engine_steps_total", "outcome")},
                "Evicted: the memory for graphs is full and the oldest go.",
            ),
            Panel(
                "Memory of graphs",
                "bytes",
                {"{{instance}}": "tulip_graph_bytes"},
                "Device memory that captured graphs hold.",
            ),
        ),
    ),
    Row(
        "Refused, cut, dropped",
        (
            Panel(
                "Overload: refused requests",
                "reqps",
                {"{{lane}}, {{bound}}": rate("ivy_overload_refusals_total", "lane", "bound")},
                "429 with Retry-After: too many tokens inside, or no answer in time to be expected.",
            ),
            Panel(
                "Errors by kind",
                "ops",
                {"{{kind}}": rate("ivy_errors_total", "kind")},
                "Clients' mistakes and our failures, by the name of the error.",
            ),
            Panel(
                "Inputs cut to the limit",
                "percentunit",
                {"cut": share(rate("ivy_truncated_inputs_total"), rate("ivy_inputs_total"))},
                "Share of inputs whose end the model never sees.",
            ),
            Panel(
                "Servers: refused chunks",
                "ops",
                {"{{reason}}, {{lane}}": rate("tulip_refused_chunks_total", "reason", "lane")},
                "At the door: full, draining, or no longer possible in time.",
            ),
            Panel(
                "Servers: dropped sequences",
                "ops",
                {"{{reason}}": rate("tulip_skipped_sequences_total", "reason")},
                "Cancelled or expired while they waited: they cost the device nothing.",
            ),
            Panel(
                "Rows with NaN or infinity",
                "ops",
                {"rows": rate("ivy_non_finite_rows_total")},
                "Refused, never sent to a client. Anything but 0 needs a look.",
            ),
        ),
    ),
    Row(
        "Replicas",
        (
            Panel(
                "Outstanding tokens by replica",
                "short",
                {"{{replica}}": "sum by (replica) (ivy_replica_outstanding_tokens)"},
                "Sent and not yet answered: what the gateways balance on.",
            ),
            Panel(
                "Ready, as the gateways see it",
                "none",
                {"{{replica}}": "min by (replica) (ivy_replica_ready)"},
                "1 while every gateway sends work there.",
            ),
            Panel(
                "Replicas by state",
                "none",
                {"{{state}}": "sum by (state) (ivy_replica_state)"},
                "Counted once by each gateway process.",
            ),
            Panel(
                "Taken out and back in",
                "ops",
                {
                    "out: {{reason}}": rate("ivy_replica_ejections_total", "reason"),
                    "back in": rate("ivy_replica_recoveries_total"),
                },
                "Stalled: silent. Wedged: no step ends. Ejected: failures in a row.",
            ),
            Panel(
                "Chunks sent a second time",
                "ops",
                {"{{reason}}": rate("ivy_chunk_retries_total", "reason")},
                "After a lost stream or a server that is going; clients notice nothing.",
            ),
            Panel(
                "Age of the oldest step",
                "s",
                {"{{instance}}": "tulip_oldest_step_seconds"},
                "Forward progress itself: it grows when the device does not answer.",
            ),
        ),
    ),
)
