"""A wrong argument fails when the strategy is built, before any process starts, and says what is right."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_pgroup import PGroupDDPStrategy
from lightning_pgroup.config import parse_duration
from lightning_pgroup.process_state import existing_process_state

BAD = [
    ({"destroy": "sometimes"}, ValueError, "'on_teardown', 'per_trainer'"),
    ({"destroy": []}, ValueError, "empty"),
    ({"destroy": ["never", "on_error"]}, ValueError, "stands alone"),
    ({"destroy": "on_error", "on_error": "keep"}, ValueError, "`on_error='abort'`"),
    ({"on_error": "explode"}, ValueError, "'abort', 'destroy', 'keep'"),
    ({"on_mismatch": "ignore"}, ValueError, "'recreate', 'reuse', 'error'"),
    ({"destroy_timeout": -1}, ValueError, "more than 0 seconds"),
    ({"destroy_timeout": 0}, ValueError, "more than 0 seconds"),
    ({"destroy_timeout": float("nan")}, ValueError, "finite"),
    ({"destroy_timeout": float("inf")}, ValueError, "finite"),
    ({"destroy_timeout": "soon"}, ValueError, "such as '0:00:30'.*got 'soon'"),
    ({"destroy_timeout": "30s"}, ValueError, "such as '0:00:30'.*got '30s'"),
    ({"destroy_timeout": "0:00:30x"}, ValueError, "such as '0:00:30'"),
    ({"destroy_timeout": "0:00:99"}, ValueError, "such as '0:00:30'"),
    ({"destroy_timeout": "0:00:00"}, ValueError, "more than 0 seconds"),
    ({"destroy_timeout": "9" * 400 + ":00:00"}, ValueError, "must be"),
    ({"destroy_timeout": [3]}, TypeError, "number of seconds, a `timedelta`"),
    ({"destroy_timeout": True}, TypeError, "number of seconds"),
    ({"rendezvous_timeout": -0.5}, ValueError, "`rendezvous_timeout`"),
    ({"rendezvous_timeout": 1e300}, ValueError, "at most"),
    ({"timeout": timedelta(seconds=-3)}, ValueError, "`timeout`"),
    ({"parallel_devices": ["abacus"]}, ValueError, "`parallel_devices`.*cpu, cuda"),
    ({"parallel_devices": "cpu"}, TypeError, "a list of devices"),
    ({"pg_options": {"class_path": "x.Y"}}, TypeError, "could not build 'x.Y'"),
    ({"record": ""}, ValueError, "path of a file or a folder"),
    ({"record": "a\0b"}, ValueError, "path of a file or a folder"),
    ({"record": b"x"}, TypeError, "path of a file or a folder"),
    ({"record": True}, TypeError, "path of a file or a folder"),
    ({"process_group_backend": "smoke-signals"}, ValueError, "does not have. It has: .*'gloo'"),
    ({"process_group_backend": "cpu:gloo,cuda:carrier-pigeon"}, ValueError, "'carrier-pigeon'"),
    ({"process_group_backend": 3}, TypeError, "must be a string"),
    ({"init_method": "http://x"}, ValueError, "'env://', 'tcp://'"),
    ({"init_method": "tcp://"}, ValueError, "with host:port"),
    ({"init_method": "tcp://host"}, ValueError, "with host:port"),
    ({"init_method": "tcp://host:port"}, ValueError, "with host:port"),
    ({"init_method": "tcp://[::1"}, ValueError, "with host:port"),
    ({"init_method": "file://"}, ValueError, "with a path"),
    ({"init_method": "env:"}, ValueError, "'env://'"),
    ({"init_method": 5}, TypeError, "must be a string"),
    ({"start_method": "teleport"}, ValueError, "'popen', 'spawn', 'fork', 'forkserver'"),
    ({"find_unused_paramters": True}, TypeError, "knows 'find_unused_paramters'.*Did you mean 'find_unused_parameters'"),
    ({"on_eror": "abort"}, TypeError, "Did you mean 'on_error'"),
    ({"device_ids": [0]}, TypeError, "'device_ids'.*set by Lightning"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD, ids=[str(list(bad[0].items())) for bad in BAD])
def test_bad_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        PGroupDDPStrategy(**arguments)


@pytest.mark.parametrize("name", sorted(n for n in ("nccl", "mpi", "ucc") if not dist.is_backend_available(n)))
def test_a_backend_that_this_torch_was_built_without(name):
    with pytest.raises(ValueError, match=f"'{name}', which this build of torch does not have"):
        PGroupDDPStrategy(process_group_backend=name)


def test_arguments_after_lightnings_own_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        PGroupDDPStrategy(*[None] * 11, "popen", "on_teardown")


def test_durations():
    assert parse_duration("x", 1.5) == timedelta(seconds=1.5)
    assert parse_duration("x", 2) == timedelta(seconds=2)
    assert parse_duration("x", timedelta(minutes=1)) == timedelta(minutes=1)
    for span in (timedelta(seconds=30), timedelta(days=1, hours=12), timedelta(days=3, microseconds=7), timedelta(hours=23)):
        assert parse_duration("x", str(span)) == span
    assert PGroupDDPStrategy(timeout=20)._timeout == timedelta(seconds=20)
    assert PGroupDDPStrategy(timeout=None)._timeout is None


def test_building_a_strategy_makes_no_runtime_state():
    threads = threading.active_count()
    PGroupDDPStrategy(destroy=["on_teardown", "on_error"], process_group_backend="gloo", find_unused_parameters=True)
    assert existing_process_state() is None
    assert threading.active_count() == threads
