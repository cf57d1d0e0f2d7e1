"""The data sets: what their files hold, where they are looked for, and how the free ones are downloaded."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastweights.errors import DataError, did_you_mean, one_line
from fastweights.files import name_part
from fastweights.tasks._archives import DataFile, FileCheck, check_file

__all__ = ["DATASETS", "DataFile", "DataSet", "DataStatus", "FileCheck", "check", "get", "locate", "status"]


@dataclass(frozen=True)
class DataSet:
    """A data set: its files lie side by side in a folder that has its name.

    Examples:
        >>> [file.name for file in DATASETS["wikitext-2"].files]
        ['wiki.train.tokens', 'wiki.valid.tokens', 'wiki.test.tokens']
    """

    name: str
    title: str
    licence: str
    homepage: str
    layout: str  # a description of the files, for those who put them there by hand
    files: tuple[DataFile, ...]
    megabytes: int  # size of all files on disk

    @property
    def downloadable(self) -> bool:
        """True where every file is free to download from a known place."""
        return all(file.url for file in self.files)


@dataclass(frozen=True)
class DataStatus:
    """One row of the list of data sets; `path` is None where the set is not found or not complete.

    Examples:
        >>> row = status()[0]
        >>> row.name, row.title, row.licence, row.downloadable
        ('mnist', 'MNIST handwritten digits', 'free to use', True)
    """

    name: str
    title: str
    licence: str
    path: Path | None
    downloadable: bool


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_OMNIGLOT = "https://github.com/brendenlake/omniglot/raw/master/python/"
_BANKING = "https://github.com/PolyAI-LDN/task-specific-datasets"
_CLINC = "https://github.com/clinc/oos-eval"
_NO_LICENCE = "no open licence"

# fmt: off
_ALL = (
    DataSet(
        "mnist", "MNIST handwritten digits", "free to use", "http://yann.lecun.com/exdb/mnist/",
        "the four idx files, compressed by gzip",
        tuple(DataFile(f"{name}-ubyte.gz", size, sha256, f"{_MNIST}{name}-ubyte.gz") for name, size, sha256 in (
            ("train-images-idx3", 47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
            ("train-labels-idx1", 60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
            ("t10k-images-idx3", 7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
            ("t10k-labels-idx1", 10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
        )),
        11,
    ),
    DataSet(
        "omniglot", "Omniglot handwritten characters", "MIT", "https://github.com/brendenlake/omniglot",
        "the two zip files of the repository's folder python",
        tuple(DataFile(name, size, sha256, _OMNIGLOT + name, pixels=True) for name, size, sha256 in (
            ("images_background.zip", 19280, "28cba60e9ad75ebbff5ade6e0dba7ee338f4f2029dc60ec7a1d363280a6448f7"),
            ("images_evaluation.zip", 13180, "9c1a6e33e8f83425f4ef78f0dc8e75c224502f2e9304bda38a79d20a92bee5da"),
        )),
        15,
    ),
    DataSet(
        "ptb", "Penn Treebank, Mikolov's 10,000 words", _NO_LICENCE, "https://catalog.ldc.upenn.edu/LDC99T42",
        "Mikolov's preprocessed text, one sentence a line",
        (
            DataFile("ptb.train.txt", 5101618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
            DataFile("ptb.valid.txt", 399782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
            DataFile("ptb.test.txt", 449945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
        ),
        6,
    ),
    DataSet(
        "wikitext-2", "WikiText-2, word level", "CC BY-SA", "https://huggingface.co/datasets/Salesforce/wikitext",
        "the three files out of wikitext-2-v1.zip",  # one archive, so none of these files has an address of its own
        (
            DataFile("wiki.train.tokens", 10797148, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
            DataFile("wiki.valid.tokens", 1121681, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
            DataFile("wiki.test.tokens", 1256449, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
        ),
        13,
    ),
    DataSet(
        "wikitext-103", "WikiText-103, word level", "CC BY-SA", "https://huggingface.co/datasets/Salesforce/wikitext",
        "the three files out of wikitext-103-v1.zip",  # known by their numbers of tokens, which `tasks.text` checks
        tuple(DataFile(f"wiki.{split}.tokens", 0, "") for split in ("train", "valid", "test")),
        544,
    ),
    DataSet(
        "mini-imagenet", "mini-ImageNet, 200 images a class", _NO_LICENCE,
        "https://www.image-net.org (splits: https://github.com/twitter-research/meta-learning-lstm)",
        "images.zip holds images/*.jpg of 84x84 pixels; the csv files are the splits of Ravi and Larochelle (filename, "
        "label), cut to the first 200 images of each class",
        (
            DataFile("images.zip", 20000, "80a930e37eb7762faff91d20dc07bd3a9a8610813a32621530ed33ddb29d9c1a"),
            DataFile("train.csv", 422416, "fb885c412c2b697bf8a9c0396d96ad3ebd09774f80513cf861e558179261f7ad"),
            DataFile("val.csv", 105616, "5eab744a353c3fb72309e54baeda85b75dbb70428a3145adb00bee6add46e873"),
            DataFile("test.csv", 132016, "c60c8fe8527047b756a725a64737cfc6159ea021fe277b7a9e5472549b697e1c"),
        ),
        86,
    ),
    DataSet(
        "fer2013", "FER2013 facial expressions", _NO_LICENCE,
        "https://www.kaggle.com/c/challenges-in-representation-learning-facial-expression-recognition-challenge",
        "a zip of {Training,PublicTest,PrivateTest}/{class}/*.jpg, 48x48 grey",
        (DataFile("fer2013_jpg.zip", 35887, "f79b7fafea375a511998910a9d3358bc26869e7e4fc2d378c03765ba16561fc2"),),
        72,
    ),
    DataSet(
        "gutenberg", "106 English books of Project Gutenberg", "public domain in the US", "https://www.gutenberg.org",
        "a tar of pg<id>.txt without Gutenberg's headers; the index has id, title, author, words and source_file",
        (
            DataFile("gutenberg_en.tar.xz", 106, "9b52a8eb0763f5b6b10531bcaa227ae00e4cdd4922051662907973403f94465c"),
            DataFile("index.tsv", 7218, "a250793d313e2422389d7b8f9e4ed4f22cb32818e783afdefa4792dcef003daf"),
        ),
        18,
    ),
    DataSet(
        "reuters21578", "Reuters-21578 dated news", _NO_LICENCE,
        "https://archive.ics.uci.edu/dataset/137/reuters+21578+text+categorization+collection",
        "one JSON object a line: id, split, date, title, topics, body",
        (DataFile(
            "reuters21578.jsonl.xz", 19452983, "6364e5e2281308021e31717df3fdf111af1dea1f82b976172fd0b9df4bc59ce9",
        ),),
        4,
    ),
    DataSet(
        "banking77", "Banking77, questions to a bank of 77 kinds", "CC BY", _BANKING,
        "two csv files with the columns text and category",
        tuple(DataFile(f"{name}.csv", size, sha256, f"{_BANKING}/raw/master/banking_data/{name}.csv")
              for name, size, sha256 in (
            ("train", 839073, "b06e26ac675513959a63135f11b94ea7786ed02da65db93a5650d8838cbc664b"),
            ("test", 239961, "d12d6e3bc4c3103966ae786dc435913c0c563dfa328f5a3646d0e62cfeeb474d"),
        )),
        2,
    ),
    DataSet(
        "clinc150", "CLINC150, requests of 150 kinds and of none", "CC BY", _CLINC,
        "one JSON object: by the split, pairs of a text and its kind",
        (DataFile(
            "data_full.json", 2495390, "36923c3705a59e08fe9c3883d8bc2dd966ef93e22cb78ac41171782a698d56e0",
            f"{_CLINC}/raw/master/data/data_full.json",
        ),),
        3,
    ),
)
# fmt: on
DATASETS: dict[str, DataSet] = {data_set.name: data_set for data_set in _ALL}

_Folder = str | os.PathLike[str] | None


def locate(name: str, data_dir: _Folder = None) -> Path:
    """Return a data set's folder: in `data_dir`, else in the folder FASTWEIGHTS_DATA names, else in the user's cache.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as root:
        ...     Path(root, "fer2013").mkdir()
        ...     Path(root, "fer2013", "fer2013_jpg.zip").touch()
        ...     locate("fer2013", root) == Path(root, "fer2013")
        True

    Raises:
        DataError: the name is unknown, there is no folder `data_dir`, or no place has all the set's files.
    """
    data_set = _look_up(name)
    _require(data_dir)
    folder = _find(data_set, data_dir)
    if folder is None:
        raise _missing_error(data_set, data_dir)
    return folder


def get(name: str, data_dir: _Folder = None, *, verify: bool = False, make_folder: bool = False) -> Path:
    """Return the folder of a data set, which is downloaded first if it is free and some file is missing.

    A file that is there is left alone, unless `verify` is set and its content is wrong. A download is put in place only
    once its content is known to be right; one that is killed leaves a hidden file that ends in .part and is never read.
    A `data_dir` that is not there is taken for a mistyped one, unless `make_folder` is set.

    Examples:
        >>> try:
        ...     get("wikitext2")
        ... except DataError as error:
        ...     print(str(error).partition("?")[0])
        unknown data set 'wikitext2': did you mean wikitext-2 or wikitext-103

    Raises:
        DataError: the name is unknown, there is no folder `data_dir`, the set is neither there nor free to download, or
            a download failed.
    """
    data_set = _look_up(name)
    if not make_folder:
        _require(data_dir)
    folder = _find(data_set, data_dir, make_folder)
    if folder is None:
        if not data_set.downloadable:
            raise _missing_error(data_set, data_dir)
        folder = next(_roots(data_dir, make_folder)) / name
    for file in data_set.files:
        path = folder / file.name
        if os.path.isfile(path) and not verify:
            continue
        result = check_file(path, file)
        if not result.ok and file.url is None:
            raise DataError(f"{path}: {result.found}; expected {file.expected}")
        if not result.ok:
            _download(data_set, file, folder)
    return folder


def check(name: str, data_dir: _Folder = None) -> list[FileCheck]:
    """Read every file of a data set and compare its content with what it should be.

    With `data_dir` no other place is looked at.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as root:
        ...     Path(root, "fer2013").mkdir()
        ...     Path(root, "fer2013", "fer2013_jpg.zip").touch()
        ...     [(result.ok, result.found) for result in check("fer2013", root)]
        [(False, 'damaged archive: File is not a zip file')]

    Raises:
        DataError: the name is unknown, or there is no folder `data_dir`.
    """
    data_set = _look_up(name)
    _require(data_dir)
    folder = Path(data_dir).expanduser() / name if data_dir else _find(data_set) or _choose_folder(data_set, None)
    return [check_file(folder / file.name, file) for file in data_set.files]


def status(data_dir: _Folder = None) -> list[DataStatus]:
    """Return a row for each data set, with the place where it lies.

    Examples:
        >>> [row.name for row in status() if row.downloadable]
        ['mnist', 'omniglot', 'banking77', 'clinc150']

    Raises:
        DataError: there is no folder `data_dir`.
    """
    _require(data_dir)
    return [
        DataStatus(each.name, each.title, each.licence, _find(each, data_dir), each.downloadable)
        for each in DATASETS.values()
    ]


def user_cache() -> Path:
    """Return the user's cache, which holds downloads and the arrays that were made of data sets.

    Raises:
        ModuleNotFoundError: pooch, which knows where the cache is, is not installed.
    """
    import pooch  # type: ignore[import-untyped]

    return Path(pooch.os_cache("fastweights"))


def _look_up(name: str) -> DataSet:
    if name in DATASETS:
        return DATASETS[name]
    hint = did_you_mean(name, DATASETS, most=3)
    raise DataError(f"unknown data set {name!r}: {hint}the data sets are {', '.join(sorted(DATASETS))}")


def _require(data_dir: _Folder) -> None:
    """Refuse a mistyped folder before another is searched in its place, or a download makes it."""
    if data_dir is not None and not os.path.isdir(Path(data_dir).expanduser()):
        raise DataError(
            f"there is no folder {data_dir} to look for data sets in: give --data-dir the folder that holds them; "
            f"`fastweights data get NAME --data-dir {data_dir}` makes it"
        )


def _roots(data_dir: _Folder, make_folder: bool = False) -> Iterator[Path]:
    if data_dir is not None:
        yield Path(data_dir).expanduser()
    if variable := os.environ.get("FASTWEIGHTS_DATA"):
        root = Path(variable).expanduser()
        if not os.path.isdir(root) and (os.path.exists(root) or not make_folder):
            raise DataError(
                f"FASTWEIGHTS_DATA is {variable}, and there is no such folder to look for data sets in: set it to the "
                "folder that holds them, or unset it"
            )
        yield root
    yield user_cache()


def _find(data_set: DataSet, data_dir: _Folder = None, make_folder: bool = False) -> Path | None:
    folders = (root / data_set.name for root in _roots(data_dir, make_folder))
    return next((folder for folder in folders if not _list_missing(data_set, folder)), None)


def _list_missing(data_set: DataSet, folder: Path) -> list[str]:
    # Unlike Path.is_file, os.path.isfile takes a folder that may not be entered for one that does not have the file.
    return [file.name for file in data_set.files if not os.path.isfile(folder / file.name)]


def _choose_folder(data_set: DataSet, data_dir: _Folder) -> Path:
    """Return the folder that an incomplete set belongs in: the first that exists, else the first of all."""
    folders = [root / data_set.name for root in _roots(data_dir)]
    return next((folder for folder in folders if os.path.isdir(folder)), folders[0])


def _missing_error(data_set: DataSet, data_dir: _Folder) -> DataError:
    folder = _choose_folder(data_set, data_dir)
    names = ", ".join(_list_missing(data_set, folder))
    command = f"run `fastweights data get {data_set.name}`, or " if data_set.downloadable else ""
    return DataError(
        f"data set {data_set.name} ({data_set.title}; licence: {data_set.licence}) is missing: {command}get it from "
        f"{data_set.homepage} and put {names} into {folder} ({data_set.layout}); another place can be named with "
        "--data-dir or FASTWEIGHTS_DATA"
    )


def _download(data_set: DataSet, file: DataFile, folder: Path) -> None:
    """Put a file into its folder, which is made, once its content is known to be right."""
    import pooch

    part = name_part(folder / file.name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pooch.HTTPDownloader(chunk_size=2**16)(file.url, part, None)
        result = check_file(part, file)
        if not result.ok:
            raise DataError(f"download of {file.url} refused: {result.found}; expected {file.expected}")
        part.replace(folder / file.name)
    except (OSError, ValueError) as error:
        # urllib3 tells its whole story, and the reason in the end.
        reason = one_line(getattr(error.args[0], "reason", error) if error.args else error).rpartition(">: ")[2]
        raise DataError(
            f"download of {file.url} into {folder} failed: {reason}; where there is no network, get the files of "
            f"{data_set.name} elsewhere and name the folder that holds {data_set.name}/ with --data-dir or "
            "FASTWEIGHTS_DATA"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
