"""A destination on the Hugging Face Hub: one commit, which is there whole or not at all.

Files are made in a spool. A large one is uploaded as soon as it is complete, and leaves the disk; nobody sees it before
the commit names it. The commit comes last, on top of the one that was there when the run began.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.core.files import Place
from ckpttool.core.plan import Plan
from ckpttool.errors import AccessError, OutputError, UsageError
from ckpttool.execute.destinations.base import Beginning
from ckpttool.execute.destinations.chunks import Chunks
from ckpttool.execute.destinations.hub_client import TRIES, PassingError, api, asking, patiently, pause, quiet
from ckpttool.execute.destinations.sender import Sender
from ckpttool.execute.destinations.spool import Spool
from ckpttool.execute.files import Medium
from ckpttool.execute.journal import Finished
from ckpttool.execute.options import RunOptions
from ckpttool.execute.schedule import Part, Task
from ckpttool.storage import hub_files
from ckpttool.storage.access import anonymous
from ckpttool.storage.hub import HubPlace
from ckpttool.storage.hub_access import endpoint, token
from ckpttool.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

MAIN = "main"
LARGE = 1 << 20
"""Bytes; smaller files wait for the end, and are asked about in one request."""
WAITING = 1 << 30
"""Bytes of complete files that may wait for their upload; then those who write wait."""
UPLOADS = 2
"""Files at a time; huggingface_hub sends the parts of each at the same time."""
STAYS = (".gitattributes", "README.md", "LICENSE", "LICENSE.md", "LICENSE.txt")
"""Files that --force and a pull request leave, as nobody else could write them again."""


def destination(dst: HubPlace, options: RunOptions) -> HubDestination:
    """The destination ``hf://org/model[@branch][/folder]``."""
    return HubDestination(dst, options)


class CommittedFiles(NamedTuple):
    """The files of a commit in the folder that is written."""

    commit: str
    files: Mapping[str, str]
    """Full names -> what identifies the contents: sha256 of a large file, git's name of any other."""


class HubDestination:
    """See ``Destination``."""

    spools = True
    proposes = True
    shared = False
    resumes = False
    can_record = False

    def __init__(self, dst: HubPlace, options: RunOptions) -> None:
        self.given = dst
        self.repo = dst.repo
        self.branch = dst.revision or MAIN
        parts = dst.path.split("/") if dst.path else []
        self.prefix = "".join(f"{p}/" for p in (parts[:-1] if options.single else parts))
        self.create_pr = options.create_pr
        self.keep = options.verify is not None or options.measure is not None
        self._late: set[Path] = set()
        """Small files whose last version comes when the output has been read."""
        self._base = self.branch
        """The revision that the new commit comes on top of."""
        self._tree = CommittedFiles("", {})
        """The files of the base; without a commit while there is no repository."""
        self._notes: list[str] = []
        self._spool = Spool(f"hf://{self.repo}@{self.branch}/{self.prefix}")
        self._paths: list[Path] = []
        """Local paths of the outputs, by their numbers."""
        self._sender = Sender(self._upload, UPLOADS, _bytes)
        self._sent: list[CommitOperationAdd] = []
        self._known: set[Path] = set()
        """Files that were given to the sender."""
        self._stop = threading.Event()
        self._quiet = contextlib.ExitStack()

    @property
    def partial(self) -> Path:
        return self._spool.path

    @property
    def locks(self) -> list[int]:
        return self._spool.locks

    # -- checks

    def check(self, sources: Sequence[str], roots: Sequence[str], *, force: bool, carried: Sequence[str] = ()) -> None:
        """Sources may be in the same repository: a commit does not change."""
        if len(self.branch) == 40 and not set(self.branch) - set("0123456789abcdef"):
            raise UsageError(
                "a commit cannot be changed", where=str(self.given), hint=f"name a branch: hf://{self.repo}@BRANCH"
            )
        if not token():
            raise AccessError(
                "writing to the Hugging Face Hub needs a token",
                where=str(self.given),
                hint="drop --anonymous" if anonymous() else "hf auth login, or set HF_TOKEN",
            )
        patiently(str(self.given), self._look)
        self.check_absent(force=force)

    def check_absent(self, *, force: bool, appeared: bool = False) -> None:
        if appeared:
            self._look_again()
            return
        if not self._tree.commit and self.create_pr:
            raise OutputError(
                "a pull request needs an existing repository",
                where=str(self.given),
                hint="drop --create-pr: a private repository is made",
            )
        held = sorted(set(self._tree.files) - {self.prefix + n for n in STAYS})
        if held and not force and not self.create_pr and self._base == self.branch:
            raise OutputError(
                f"the destination holds {held[0]}",
                where=str(self.given),
                hint="choose another DST, --force to replace it, or --create-pr to propose it",
            )

    def _look(self) -> None:
        """Find the commit to build on: that of the branch, else of the main branch, else there is no repository."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            self._tree = self._tree_of(self.branch)
        except RepositoryNotFoundError:
            if self.branch != MAIN:
                raise OutputError(
                    f"a new repository has no branch {self.branch}", where=str(self.given), hint=f"hf://{self.repo}"
                ) from None
        except RevisionNotFoundError:
            if self.create_pr:
                raise OutputError(
                    "a pull request needs an existing branch",
                    where=str(self.given),
                    hint="drop the branch, or drop --create-pr: the branch is made from main",
                ) from None
            self._base = MAIN
            self._tree = self._tree_of(MAIN)

    def _tree_of(self, revision: str) -> CommittedFiles:
        commit = str(api().repo_info(self.repo, revision=revision).sha)
        files = hub_files.revision(self.repo, commit).commit.files  # HfApi's list sends the token to any next page
        return CommittedFiles(commit, {n: f.blob for n, f in files.items() if n.startswith(self.prefix)})

    def _look_again(self) -> None:
        """Raises OutputError when somebody else has changed the folder since the run began."""
        now = patiently(str(self.given), lambda: self._tree_of(self._base))
        if now.files != self._tree.files:
            what = "the destination was changed by somebody else during the run"
            raise OutputError(what, where=str(self.given), hint="repeat the command")
        self._tree = now

    def check_space(self, plan: Plan) -> None:
        """It takes the order of the tasks to know (``begin``)."""

    # -- the run

    def begin(self, beginning: Beginning) -> Finished:
        """Make the spool, and a private repository where there is none; see whether it may be written."""
        if beginning.resume:
            self._notes.append(
                "nothing to resume: a commit is complete or absent; files that the Hub already has are not sent again"
            )
        plan, tasks = beginning.plan, beginning.tasks
        sizes = [o.size for o in plan.outputs]
        total = sum(sizes)
        waits = WAITING + total // 12  # of the engine, what is not recorded
        self._spool.check_space(total if self.keep else min(total, most_held(sizes, tasks) + waits))
        self._spool.open()
        self._quiet.enter_context(quiet())
        self._late = {self.partial / name for name in beginning.late}
        self._paths = [self.partial / o.name for o in plan.outputs]
        self._chunks = Chunks(plan, tasks, [n if n >= LARGE else 0 for n in sizes])  # one for each output
        try:
            patiently(str(self.given), self._open_repository)
            self.check_absent(force=beginning.force)  # another run may have made it since the check
        except BaseException:
            self.close()
            raise
        self._stop = beginning.stop
        return Finished()

    def _open_repository(self) -> None:
        from huggingface_hub import CommitOperationAdd

        hub = api()
        if not self._tree.commit:
            hub.create_repo(self.repo, private=True, exist_ok=True)
            self._tree = self._tree_of(MAIN)
            self._notes.append(f"made a private repository: {self.repo}")
        may = CommitOperationAdd(path_in_repo=f"{self.prefix}config.json", path_or_fileobj=b"{}")
        hub.preupload_lfs_files(self.repo, [may], revision=self._base, create_pr=self.create_pr)

    def make(self, path: str, size: int) -> bool:
        self._spool.make(path, size)
        return False

    def record(self, pool: Medium, parts: Sequence[Part], sums: Mapping[str, str]) -> None:
        """Upload the files that are complete; waits while too many are."""
        for file, _ in self._chunks.done([p.number for p in parts], sums):
            self._put(self._paths[file])
        self._sender.wait(WAITING, self._stop)

    def settle(self, pool: Medium, paths: Sequence[str]) -> None:
        """Nothing has to be durable here."""

    def complete(self) -> None:
        """Upload all that is left. Small files go into the commit itself."""
        found = [p for p in sorted(self.partial.rglob("*")) if p.is_file()]
        self._send([p for p in found if p not in self._known | self._late])

    def _send(self, left: Sequence[Path]) -> None:
        """Upload files. Returns when these and all that were put before are uploaded, or when the run is stopped."""
        small = [p for p in left if p.lstat().st_size < LARGE]
        for path in left:
            if path not in small:
                self._put(path)
        for i in range(0, len(small), 100):
            self._put(*small[i : i + 100])
        self._sender.wait(0, self._stop)

    def _put(self, *paths: Path) -> None:
        self._known.update(paths)
        self._sender.put(paths)
        self._sender.start()  # not before: until now this process may have been forked

    def _upload(self, paths: Sequence[Path]) -> None:
        from huggingface_hub import CommitOperationAdd

        added = [
            CommitOperationAdd(path_in_repo=self.prefix + p.relative_to(self.partial).as_posix(), path_or_fileobj=p)
            for p in paths
        ]
        with asking(str(self.given)):
            api().preupload_lfs_files(
                self.repo, added, revision=self._base, create_pr=self.create_pr, num_threads=1, free_memory=False
            )
        for path, addition in zip(paths, added, strict=True):
            if not self.keep and addition._is_uploaded:  # noqa: SLF001 - no public name says it
                self._spool.forget(str(path), 0, path.lstat().st_size)
                path.unlink()
        self._sent.extend(added)

    def readable(self) -> Place:
        return self.partial

    def seal(self) -> None:
        """The commit is one step: it has small files in it."""
        self._send([p for p in sorted(self._late) if p.is_file()])

    def publish(self, *, force: bool) -> str | None:
        """Commit. What is in the folder and was not written goes, but for ``STAYS``."""
        from huggingface_hub import CommitOperationDelete

        try:
            added = self._sent
            ours = {a.path_in_repo for a in added}
            stays = {self.prefix + n for n in STAYS}
            gone = [CommitOperationDelete(path_in_repo=n) for n in self._tree.files if n not in ours | stays]
            self._notes.append(self._commit([*added, *gone], added))
        finally:
            self.close()
        return "; ".join(self._notes)

    def _commit(
        self, operations: Sequence[CommitOperationAdd | CommitOperationDelete], added: Sequence[CommitOperationAdd]
    ) -> str:
        """Repeated where nothing was done; an answer that was lost is looked for on the Hub."""
        parent = self._tree.commit
        for tried in range(TRIES):
            try:
                with asking(str(self.given)):
                    if self._base != self.branch:
                        api().create_branch(self.repo, branch=self.branch, revision=parent, exist_ok=True)
                    info = api().create_commit(
                        self.repo,
                        operations,
                        commit_message=f"Written by ckpttool {__version__}",
                        revision=self.branch,
                        create_pr=self.create_pr,
                        parent_commit=parent,
                    )
            except PassingError:
                with contextlib.suppress(AccessError):  # the branch may not be there yet
                    if found := patiently(str(self.given), lambda: self._find(added)):
                        return self._written(found)
                if tried == TRIES - 1:
                    raise
                pause(tried)
            else:
                if info.oid == parent:  # without a commit, it is the last one
                    self.given.written(parent)
                    return f"nothing to commit: {parent} already has everything"
                return self._written(info.pr_revision or info.oid)
        raise AssertionError("the last try raises")

    def _find(self, added: Sequence[CommitOperationAdd]) -> str:
        """The commit or pull request that a request without an answer has made; "" where it has not."""
        if not self.create_pr:
            now = self._tree_of(self.branch)
            return now.commit if now.commit != self._tree.commit and _holds(now, added) else ""
        pulls = [r.ref for r in api().list_repo_refs(self.repo, include_pull_requests=True).pull_requests or ()]
        newest = sorted(pulls, key=lambda ref: int(ref.rpartition("/")[2]), reverse=True)
        return next((ref for ref in newest[:3] if _holds(self._tree_of(ref), added)), "")

    def _written(self, revision: str) -> str:
        """A note on a revision that was made: a commit, or ``refs/pr/N``."""
        self.given.written(revision)
        number = revision.rpartition("/")[2]
        page = f"{endpoint()}/{self.repo}/discussions/{number}"
        return f"made commit {revision}" if number == revision else f"opened a pull request: {page}"

    def close(self) -> None:
        self._sender.end()
        self._spool.close()
        self._quiet.close()

    def discard(self) -> None:
        self.close()


def most_held(sizes: Sequence[int], tasks: Sequence[Task]) -> int:
    """The most bytes that files of these sizes take at a time, if each goes when its last task is done.

    Tasks are done in their order, but for computed tensors, the long ones of which come first.
    """
    computed = sum(t.nbytes for t in tasks if t.computing >= 0)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, task in enumerate(tasks):
        early = task.computing >= 0 and 8 * task.nbytes > computed
        for file in {f for p in task.parts for f in p.files}:
            first[file] = min(first.get(file, i), 0 if early else i)
            last[file] = i
    changes: Counter[int] = Counter()
    for file, at in first.items():
        changes[at] += sizes[file]
        changes[last[file] + 1] -= sizes[file]
    return max(accumulate((changes[at] for at in sorted(changes)), initial=0))


def _bytes(paths: Sequence[Path]) -> int:
    """An empty file counts, too: it is waited for."""
    return sum(max(1, p.lstat().st_size) for p in paths)


def _holds(tree: CommittedFiles, added: Sequence[CommitOperationAdd]) -> bool:
    """Whether a commit has all that was to be committed."""

    def identity(a: CommitOperationAdd) -> set[str]:
        sha256 = a.upload_info.sha256.hex()
        if a._is_uploaded:  # noqa: SLF001 - no public name says it
            return {sha256}
        with a.as_file() as f:
            data = f.read()
        return {sha256, hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()}

    return all(tree.files.get(a.path_in_repo) in identity(a) for a in added)
