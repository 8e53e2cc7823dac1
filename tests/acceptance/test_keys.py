"""Two teams with keys of their own use one server through the SDK."""

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
import tinker
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tinker import types

from tests.acceptance.conftest import ready
from tests.running import START_S, Server, serving, tinsmith, tinsmith_here
from tinsmith.store.store import opened
from tinsmith.store.usage import used_between

DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2]),
    loss_fn_inputs={
        "target_tokens": types.TensorData(data=[2, 3], dtype="int64"),
        "weights": types.TensorData(data=[1.0, 1.0], dtype="float32"),
    },
)


def add_key(data_dir: Path, *arguments: str) -> str:
    """Run `tinsmith keys add`; the key that it prints."""
    made = tinsmith_here("keys", "add", *arguments, "--data-dir", str(data_dir))
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def client(server: Server, key: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key=key)


def trained(service: tinker.ServiceClient) -> tuple[tinker.TrainingClient, str]:
    """A model after a step, and the path under which its sampler weights are saved."""
    model = service.create_lora_training_client("text", rank=4).result()
    model.forward_backward([DATUM], "cross_entropy").result()
    model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    return model, model.save_weights_for_sampler("a").result().path


def used(server: Server, key: str, kinds: set[str]) -> dict[str, int]:
    """Tokens by kind as the SDK reads them, once there are some of these kinds: samples are metered within a second."""
    admin = tinker.AdminClient(base_url=server.url, api_key=key)
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=1)
    while True:
        reply = admin.get_billing_usage(start, start + timedelta(hours=3)).result()
        infos = [event.event_info for event in reply.data if event.event_info.type != "storage"]
        found: dict[str, int] = {info.type: info.token_count for info in infos if info.type != "checkpoint"}
        if kinds <= found.keys():
            return found


def test_two_teams_share_a_server_and_nothing_else_until_it_is_published(text_only: list[str], tmp_path: Path) -> None:
    keys = [add_key(tmp_path / "data", name) for name in ("vision", "speech")]
    assert all(key.startswith("tml-") for key in keys)
    with ready(tmp_path, *text_only, "--host", "0.0.0.0") as server:
        assert server.client().get("training_runs").status_code == 401
        with client(server, keys[0]) as vision, client(server, keys[1]) as speech:
            _, path = trained(vision)
            for foreign in (path, path.replace(":train:", "0:train:")):
                with pytest.raises(tinker.NotFoundError, match="there is no model"):
                    speech.create_sampling_client(model_path=foreign).result()
            prompt, few = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=3)
            tinker.RestClient(base_url=server.url, api_key=keys[0]).publish_checkpoint_from_tinker_path(path).result()
            sampler = speech.create_sampling_client(model_path=path).result()
            assert len(sampler.sample(prompt, 1, few).result().sequences[0].tokens) == 3
            runs = [
                tinker.RestClient(base_url=server.url, api_key=key).list_training_runs().result().training_runs
                for key in keys
            ]
            assert [[run.model_owner for run in each] for each in runs] == [["vision"], []]
        assert used(server, keys[0], {"training"}) == {"training": 2}
        sampling = {"sampling_prefill", "sampling_sample"}
        assert used(server, keys[1], sampling) == {"sampling_prefill": 2, "sampling_sample": 3}
        with opened(tmp_path / "data") as store:
            by_tenant = {
                each.tenant: each.used.gpu_seconds for each in used_between(store, 0, 2**40) if each.session_id
            }
        assert by_tenant.keys() == {"vision", "speech"}
        assert min(by_tenant.values()) > 0
        listed = tinsmith_here("usage", "--days", "2", "--data-dir", str(tmp_path / "data")).stdout
        assert [row.split()[:6] for row in listed.splitlines()[1:]] == [
            ["speech", "text", "0", "2", "0", "3"],
            ["vision", "text", "2", "0", "0", "0"],
        ]
        with pytest.raises(tinker.AuthenticationError, match="needs an API key that it knows"):
            client(server, "tml-unknown").get_server_capabilities()
        shown = tinsmith_here("status", server.url, "--api-key", keys[1])
        assert "loaded models: none" in shown.stdout, shown.stderr
        assert "set TINKER_API_KEY" in tinsmith_here("status", server.url).stderr


def test_a_team_keeps_its_newest_checkpoints_and_gets_a_deleted_one_back(text_only: list[str], tmp_path: Path) -> None:
    limits = "--keep-checkpoints", "2", "--checkpoint-ttl", "2h", "--storage", "1MiB"
    data_dir, secret = tmp_path / "data", add_key(tmp_path / "data", "team", *limits)
    with ready(tmp_path, *text_only) as server, client(server, secret) as team:
        model, _ = trained(team)
        paths = [model.save_state(name).result().path for name in "abc"]
        with pytest.raises(tinker.NotFoundError, match="newer ones took its place"):
            team.create_training_client_from_state(paths[0]).result()
        with pytest.raises(tinker.RequestFailedError, match="ttl_seconds=9000 is longer than the 7200 s"):
            model.save_state("d", ttl_seconds=9000).result()
        rest = tinker.RestClient(base_url=server.url, api_key=secret)
        rest.delete_checkpoint_from_tinker_path(paths[2]).result()

        def listed(*arguments: str) -> str:
            ended = tinsmith_here("checkpoints", *arguments, "--data-dir", str(data_dir))
            assert ended.returncode == 0, ended.stderr
            return ended.stdout

        assert " ".join(listed("list").split()).count("can be restored") == 2
        shown = " ".join(tinsmith_here("keys", "list", "--data-dir", str(data_dir)).stdout.split())
        assert " 0.000977 GiB, 2 checkpoints of a run, checkpoints for 2 h" in shown
        assert listed("restore", paths[2]) == f"{paths[2]} is back\n"
        again = team.create_training_client_from_state_with_optimizer(paths[2]).result()
        assert again.forward([DATUM], "cross_entropy").result().loss_fn_outputs
        with tinker.ServiceClient(base_url=server.url, api_key=secret) as mate:
            found = mate.create_rest_client().list_user_checkpoints().result().checkpoints
        expected = [*paths[1:], paths[0].replace("weights/a", "sampler_weights/a")]
        assert {each.tinker_path for each in found} == set(expected)
        assert all(each.expires_at is not None for each in found)


def test_without_keys_a_server_serves_this_machine_only(text_only: list[str], tmp_path: Path) -> None:
    refused = tinsmith("serve", *text_only, "--data-dir", str(tmp_path), "--port", "0", "--host", "0.0.0.0")
    assert refused.returncode == 2
    assert "host=0.0.0.0 can be reached from other machines, and there are no API keys" in refused.stderr


def certificate() -> tuple[bytes, bytes]:
    """A certificate for 127.0.0.1, and its private key, in PEM."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "here")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return made.sign(key, hashes.SHA256()).public_bytes(pem), private


def test_a_server_with_a_certificate_speaks_https(text_only: list[str], tmp_path: Path) -> None:
    file = tmp_path / "tls.pem"
    file.write_bytes(b"".join(certificate()))
    with serving(tmp_path, *text_only, "--tls-cert", str(file)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(file))
        assert httpx.get(f"{server.url}/api/v1/livez", verify=trusting, timeout=START_S).json() == {"status": "ok"}
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/api/v1/livez".replace("https", "http"), timeout=START_S)
