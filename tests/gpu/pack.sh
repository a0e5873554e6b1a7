#!/bin/bash
# Makes .whl/: the wheels that a machine with a GPU, torch, transformers and torchmetrics may lack, for a machine without
# a network. `make gpu-run` installs them there. PYTHON_VERSION is that machine's (default 3.12, Linux on x86-64).
set -eu
into=${1:-.whl}
mkdir -p "$into"
platforms="--platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64"
platforms="$platforms --platform manylinux2014_x86_64 --platform manylinux1_x86_64"
# pydantic, typer and what they need: every command. pycocotools: detection. simplejpeg: fast JPEG. nibabel, pydicom: CT.
# setuptools: it installs Lockstep itself. filelock and typing_extensions: those of the machine may be older.
wanted="pydantic pydantic_core annotated-types typing-inspection typing_extensions filelock typer shellingham rich \
    markdown-it-py mdurl pygments click pycocotools simplejpeg nibabel pydicom setuptools wheel pytest pluggy iniconfig"
for name in $wanted; do
    pinned=$(grep -iE "^${name//[-_]/[-_]}==" constraints.txt | head -n 1 || true)
    "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --python-version "${PYTHON_VERSION:-3.12}" --implementation cp $platforms --dest "$into" "${pinned:-$name}"
done
echo "$(ls "$into"/*.whl | wc -l) wheels, $(du -sk "$into" | cut -f1) kB, in $into"
