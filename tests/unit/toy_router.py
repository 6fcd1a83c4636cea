"""A router on sockets in front of fake workers, with a toy model that has a token for each byte."""

import asyncio
from types import SimpleNamespace

import httpx
import openai
import tokenizers
from fake_worker import VOCAB_SIZE, FakeWorker, ServedWorker
from grpc import aio
from msgspec import structs

from pd_cluster.config import ClusterConfig, ModelSection, RouterSection
from pd_cluster.model.chat_template import ChatTemplate
from pd_cluster.model.config import GqaConfig, ModelConfig, RopeConfig
from pd_cluster.model.tokenizer import SpecialTokens, Tokenizer, byte_alphabet
from router.app import Router
from router.grpc_api import ConnectionLimits

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, and id 256 as end of sequence."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(byte_alphabet())}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, SpecialTokens(eos="<eos>"))


def toy_model(**changes: object) -> SimpleNamespace:
    config = ModelConfig(
        architecture="toy",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        num_layers=1,
        intermediate_size=8,
        attention=GqaConfig(num_heads=1, num_kv_heads=1, head_dim=8),
        rope=RopeConfig(theta=1e4, dim=8),
        moe=None,
        moe_layers=(),
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        dtype="float32",
        bos_token_id=None,
        eos_token_ids=(256,),
    )
    parts = {
        "name": "toy",
        "config": config,
        "tokenizer": byte_tokenizer(),
        "chat_template": ChatTemplate(TEMPLATE),
        "eos_token_ids": (256,),
    }
    return SimpleNamespace(**{**parts, **changes})


class System:
    """A router and its fake workers, with clients."""

    def __init__(
        self, *workers: FakeWorker, model: object = None, grpc_limits: ConnectionLimits | None = None, **router: object
    ) -> None:
        peers = {worker.id: worker for worker in workers}
        for worker in workers:
            worker.peers = peers
        self.served = [ServedWorker(worker, heartbeat_s=0.05) for worker in workers]
        self.model = model or toy_model()
        config = ClusterConfig(
            model=ModelSection(path="toy"),
            router=RouterSection(http_port=0, **router),  # type: ignore[arg-type]
        )
        self.router = Router(config, self.model, grpc_limits=grpc_limits)  # type: ignore[arg-type]

    async def __aenter__(self) -> "System":
        await self.router.start()
        for served in self.served:
            await served.start()
            self.router.add_worker(served.address)
        async with asyncio.timeout(10):
            await self.router.until_ready(len(self.served))
        self.url = f"http://127.0.0.1:{self.router.http_port}"
        self.client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self.http = httpx.AsyncClient(base_url=self.url)
        self.grpc_address = f"127.0.0.1:{self.router.grpc_port}"
        self.channel = aio.insecure_channel(self.grpc_address, options=[("grpc.use_local_subchannel_pool", 1)])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.http.aclose()
        await self.channel.close()
        await self.router.stop()
        for served in self.served:
            await served.stop()

    async def restart(self) -> None:
        """Another router at the same gRPC port, in front of the same workers."""
        section = structs.replace(self.router.config.router, grpc_port=self.router.grpc_port)
        config = structs.replace(self.router.config, router=section)
        await self.router.stop()
        self.router = Router(config, self.model, addresses=[served.address for served in self.served])  # type: ignore[arg-type]
        await self.router.start()

    @property
    def workers(self) -> list[FakeWorker]:
        return [served.worker for served in self.served]

    def say(self, text: str) -> None:
        for worker in self.workers:
            worker.reply = text.encode()

    async def until_empty(self) -> None:
        """Nothing of any request is left on any side."""
        async with asyncio.timeout(5):
            while not (self.router.pipeline.idle() and all(worker.empty for worker in self.workers)):  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def post(self, path: str, body: object) -> httpx.Response:
        return await self.http.post(path, json=body)
