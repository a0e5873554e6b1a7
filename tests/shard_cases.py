"""Shards of every format, written by the libraries that users write them with; a server of files; a training."""

import functools
import gzip
import io
import json
import tarfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import lockstep
import lockstep_recipes
from lockstep_lab.verify.reference.order import seed_of
from lockstep_recipes.shards.order import ShardOrder
from tests import runs

SIZES = (7, 1, 12, 5)
"""Samples of each shard."""
SAMPLES = [{"number": number, "text": f"sample {number}\n"} for number in range(sum(SIZES))]


def by_shard():
    ends = np.cumsum(SIZES)
    return [SAMPLES[end - size : end] for end, size in zip(ends, SIZES, strict=True)]


def json_lines(samples):
    return "".join(json.dumps(sample) + "\n" for sample in samples).encode()


def json_lines_gz(samples):
    return gzip.compress(json_lines(samples))


def parquet(samples, rows=4):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(samples), file, row_group_size=rows)
    return file.getvalue()


def feather(samples, rows=4, new=pa.ipc.new_file):
    file, table = io.BytesIO(), pa.Table.from_pylist(samples)
    with new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return file.getvalue()


def arrow_stream(samples):
    return feather(samples, new=pa.ipc.new_stream)


def tar(samples):
    """KEY.json and KEY.txt of each sample; long names have a header of their own."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for sample in samples:
            key = f"{'long/' * 30}{sample['number']:06d}"
            for suffix, data in (("json", json.dumps(sample).encode()), ("Seg.TXT", sample["text"].encode())):
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def mds(samples):
    """A shard of MDS with the columns number (int64) and text, written as its source describes the format."""
    config, rows = b'{"any": "text"}', []
    for sample in samples:
        text = sample["text"].encode()
        rows.append(np.uint32(len(text)).tobytes() + np.int64(sample["number"]).tobytes() + text)
    offsets = np.cumsum([0, *map(len, rows)]) + 4 + 4 * (len(rows) + 1) + len(config)
    return np.uint32(len(rows)).tobytes() + offsets.astype(np.uint32).tobytes() + config + b"".join(rows)


def mds_folder(folder, pack=None, compression=None):
    entries = []
    for number, samples in enumerate(by_shard()):
        data, name = mds(samples), f"shard.{number:05d}.mds"
        raw, zipped = {"basename": name, "bytes": len(data), "hashes": {}}, None
        if pack:
            packed = pack(data)
            zipped = {"basename": f"{name}.{compression}", "bytes": len(packed), "hashes": {}}
            (folder / zipped["basename"]).write_bytes(packed)
        else:
            (folder / name).write_bytes(data)
        columns = {"column_names": ["number", "text"], "column_encodings": ["int", "str"], "column_sizes": [8, None]}
        about = {"format": "mds", "version": 2, "compression": compression, "hashes": [], "samples": len(samples)}
        entries.append(columns | about | {"raw_data": raw, "zip_data": zipped, "size_limit": 1 << 26})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return folder


WRITERS = {
    "jsonl": json_lines,
    "jsonl.gz": json_lines_gz,
    "parquet": parquet,
    "feather": feather,
    "arrow": arrow_stream,
    "tar": tar,
}


def write(folder, suffix="jsonl"):
    """`SAMPLES` in shards of one format. Returns the folder."""
    folder.mkdir(exist_ok=True)
    if suffix == "mds":
        return mds_folder(folder)
    for number, samples in enumerate(by_shard()):
        (folder / f"part-{number}.{suffix}").write_bytes(WRITERS[suffix](samples))
    return folder


def plain(sample):
    """A sample of any format as it is in `SAMPLES`."""
    if isinstance(sample, dict) and "__key__" in sample:
        assert sample["seg.txt"] == json.loads(sample["json"])["text"].encode()
        return json.loads(sample["json"])
    return sample


class Handler(SimpleHTTPRequestHandler):
    """Files with ranges, as most servers give them. Python's own server knows no ranges."""

    def do_GET(self):
        server, ranges = self.server, self.headers.get("Range")
        if server.failures > 0:
            server.failures -= 1
            self.send_error(503)
            return
        path = server.folder / unquote(self.path).lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        size, code = len(data), 200
        if ranges and server.has_ranges:
            first, last = map(int, ranges.removeprefix("bytes=").split("-"))
            data, code = data[first : last + 1], 206
        server.sent.append((self.path, len(data)))
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        if code == 206:
            self.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/{size}")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Server:
    """A server of a folder's files in a thread. `url` is its address."""

    def __init__(self, folder, has_ranges=True):
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self.http.folder, self.http.has_ranges, self.http.failures, self.http.sent = folder, has_ranges, 0, []
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self):
        Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


class ShardTask(lockstep.Task):
    """Regression in float64 on the numbers of `SAMPLES`, with noise from each sample's own seed."""

    def __init__(self, source, window=6):
        self.source, self.window = source, window

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()

    def train_data(self):
        return lockstep_recipes.Shards(self.source, window=self.window)

    def prepare(self, sample, epoch, training):
        sample = plain(sample)
        inputs = torch.tensor([sample["number"] / 10, len(sample["text"])], dtype=torch.float64)
        return inputs + 0.1 * torch.rand(2, dtype=torch.float64), inputs[:1].sin()

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum()


BATCH = 6


def settings(steps, **sections):
    """An epoch has 5 steps, the last of them with a single sample."""
    return runs.config(train={"steps": steps}, batch={"global": BATCH}, checkpoint={"mode": "sync"}, **sections)


def trained(source, steps, folder, workers=0, on_error="raise"):
    """Weights after a training in `folder`, for ranks."""
    return runs.fit(ShardTask(source), settings(steps, data={"workers": workers, "on_error": on_error}), folder)[0]


def by_hand(source, steps):
    """Weights of plain torch on one process. The order is that of the page: shards, behind each other, in windows."""
    torch.manual_seed(0)
    task = ShardTask(source)
    model, order = task.model(), ShardOrder(SIZES, task.window)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(steps):
        epoch, within = divmod(step, -(-len(SAMPLES) // BATCH))
        positions = np.arange(within * BATCH, min((within + 1) * BATCH, len(SAMPLES)))
        batch = []
        for position, index in zip(positions.tolist(), order(positions, seed=0, epoch=epoch).tolist(), strict=True):
            torch.manual_seed(seed_of(0, epoch, position))
            batch.append(task.prepare(SAMPLES[index], epoch, True))
        collated = torch.utils.data.default_collate(batch)
        optimizer.zero_grad()
        (task.loss(model, collated) / len(batch)).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
