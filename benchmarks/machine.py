"""Where and when something is measured."""
import platform
import re
import subprocess
import time
from importlib import metadata

import torch

PACKAGES = dict(triton="triton", transformers="transformers", flashinfer="flashinfer-python")


def _version(package):
    try: return metadata.version(package)
    except metadata.PackageNotFoundError: return None

def _driver():
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try: said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError): return None
    return said.split("\n")[0].strip()

def machine(device: str = "cuda") -> dict:
    "gpu (\"CPU\" for a processor), driver, cuda, cudnn, python, versions of packages or None, and the date."
    gpu = torch.device(device).type == "cuda"
    return dict(gpu=torch.cuda.get_device_name() if gpu else "CPU", driver=_driver() if gpu else None,
                cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version() if gpu else None,
                python=platform.python_version(), torch=torch.__version__,
                **{name: _version(package) for name, package in PACKAGES.items()},
                date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))

def file_word() -> str:
    "The machine's name, as it stands in the names of files."
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return re.sub("[^a-z0-9]+", "_", gpu.lower()).strip("_")
