"""ServerConfig: its checks, and that its keys are never shown."""

from __future__ import annotations

import dataclasses

import pytest

from configs.checks import ConfigError
from configs.load import config_text, load_configs
from configs.server import ServerConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"port": 65536}, r"port must be in \[0, 65535\]"),
        ({"port": 9000, "admin_port": 9000}, "port=9000 is not its own"),
        ({"host": ""}, "host='' is no address"),
        ({"host": "a b"}, "host='a b' is no address"),
        ({"served_model_name": "\n"}, "served_model_name"),
        ({"max_n": 129}, r"max_n must be in \[1, 128\]"),
        ({"drain_grace_s": float("nan")}, "drain_grace_s must be a finite number"),
        ({"max_body_bytes": True}, "max_body_bytes must be an integer"),
        ({"batch_dir": " "}, "batch_dir=' ' is no folder"),
        ({"batch_dir": "a\0b"}, "is no folder"),
        ({"grpc_reflection": 1}, "grpc_reflection must be true or false"),
    ],
)
def test_a_value_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**fields)


@pytest.mark.parametrize("keys", ["secret-1", ("secret-1", "secret 2"), ("secret-1", ""), ("secret-1\n",), (5,)])
def test_a_bad_key_is_refused_without_showing_it(keys):
    with pytest.raises(ConfigError, match="api_keys") as refused:
        ServerConfig(api_keys=keys)
    assert "secret" not in str(refused.value)


def test_keys_are_in_no_printed_form_of_the_config():
    configs = load_configs(gin_bindings=["ServerConfig.api_keys = ('secret-1',)", "ServerConfig.port = 1"])
    assert configs.server.api_keys == ("secret-1",)
    text = config_text(configs)
    assert "secret" not in text + repr(configs)
    assert "# ServerConfig.api_keys is not shown: 1" in text
    assert load_configs(gin_bindings=[text]).server == dataclasses.replace(configs.server, api_keys=())


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("api_key_tenants", {"api_key_tenants": ("a",)}),
        ("api_key_tenants", {"api_keys": ("k", "l"), "api_key_tenants": ("a",)}),
        ("api_key_tenants", {"api_keys": ("k",), "api_key_tenants": ("",)}),
        ("api_key_tenants", {"api_keys": ("k",), "api_key_tenants": ("x" * 65,)}),
        ("api_key_tenants", {"api_keys": ("k",), "api_key_tenants": "a"}),
        ("tenant_header", {"tenant_header": "X Tenant"}),
        ("tenant_header", {"tenant_header": ""}),
        ("tenant_header", {"tenant_header": "X-Tenant", "api_keys": ("k",), "api_key_tenants": ("a",)}),
    ],
)
def test_tenants_that_cannot_be_told_are_refused(name, fields):
    with pytest.raises(ConfigError, match=f"ServerConfig.{name}"):
        ServerConfig(**fields)


def test_operations_are_bound_and_printed_like_the_other_configs():
    configs = load_configs(gin_bindings=["OperationsConfig.ttft_slo_s = 1.5", "OperationsConfig.json_logs = True"])
    assert (configs.operations.ttft_slo_s, configs.operations.json_logs) == (1.5, True)
    assert "OperationsConfig.ttft_slo_s = 1.5" in config_text(configs)
    assert load_configs(gin_bindings=[config_text(configs)]).operations == configs.operations
