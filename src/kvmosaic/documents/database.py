"""Database of stored documents: SQLite in a file or in memory, or PostgreSQL, through SQLAlchemy.

documents   one row for each stored document: its version, settings and figures
texts       the text of each document, and those of its earlier versions that may still be read
deleted     recently deleted ids, whose versions and places in lists must not be given to others
tenants     for each tenant the last change, the last place in its list, and how much it stores
clock       seconds that have passed for times to live; not moved by changes of the system's clock
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import Any

from platformdirs import user_data_path
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    func,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from kvmosaic.errors import DocumentStoreUnavailable, InvalidConfig, pip_install

FILE_NAME = "documents.sqlite3"
RESERVE_NAME = "documents.reserve"
RESERVE_BYTES = 2**23
"""Of a disk: documents are stored as long as they leave so much, which deletions use."""
SCHEMA_VERSION = 1
NO_FOLDER = "none"
"""The `documents_dir` of documents in memory."""
logger = logging.getLogger("kvmosaic.documents")
_BUSY_SECONDS = 30.0
SHORT_SECONDS = 1.0
"""Wait for a busy database before a write that a request can do without, such as that of its hits."""
_CLOCK_SECONDS = 10.0
"""Seconds after which the clock is saved again: what a reboot or a killed process may add to a time to live."""
_NETWORK_LIMITS = {"tcp_user_timeout": 30_000, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
"""Of connections to PostgreSQL: a machine that has vanished is noticed in half a minute, not a quarter of an hour."""
_TABLES = MetaData()

DOCUMENTS = Table(
    "kvmosaic_documents",
    _TABLES,
    Column("tenant", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("version", Integer, nullable=False),
    Column("change", BigInteger, nullable=False),
    Column("text_number", BigInteger, nullable=False),
    Column("metadata", JSON, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("updated_at", Float(53), nullable=False),
    Column("ttl_seconds", Integer),
    Column("refresh_ttl_on_hit", Boolean, nullable=False),
    Column("expires_at", Float(53)),
    Column("pinned", Boolean, nullable=False),
    Column("priority", Float(53)),
    Column("num_characters", Integer, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("hits", BigInteger, nullable=False),
    Column("last_used_at", Float(53)),
    Index("kvmosaic_documents_by_number", "tenant", "number", unique=True),
    Index("kvmosaic_documents_by_change", "tenant", "change"),
    Index("kvmosaic_documents_by_expiry", "expires_at"),
)
"""`change` and `text_number` are the tenant's changes that wrote the row and its text; `expires_at` is of `clock`."""

TEXTS = Table(
    "kvmosaic_document_texts",
    _TABLES,
    Column("tenant", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("expires_at", Float(53)),
    Column("num_bytes", BigInteger, nullable=False),
    Column("title", String),
    Column("text", LargeBinary, nullable=False),
    Column("checksum", BigInteger),
    Index("kvmosaic_document_texts_by_expiry", "expires_at"),
)
"""`version` is the first version of the document with this text; `expires_at` is null for the current text. The
`checksum` is of title and text; null: written before there were checksums."""

DELETED = Table(
    "kvmosaic_deleted_documents",
    _TABLES,
    Column("tenant", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("version", Integer, nullable=False),
    Column("change", BigInteger, nullable=False),
    Index("kvmosaic_deleted_documents_by_change", "tenant", "change"),
)

TENANTS = Table(
    "kvmosaic_document_tenants",
    _TABLES,
    Column("tenant", String, primary_key=True),
    Column("last_change", BigInteger, nullable=False),
    Column("last_number", BigInteger, nullable=False),
    Column("forgotten_change", BigInteger, nullable=False),
    Column("num_documents", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("num_earlier_bytes", BigInteger, nullable=False),
)
"""`forgotten_change`: the highest change of rows that `deleted` no longer has; `num_earlier_bytes`: replaced texts."""

_CLOCK = Table(
    "kvmosaic_document_clock",
    _TABLES,
    Column("schema_version", Integer, primary_key=True),
    Column("seconds", Float(53), nullable=False),
    Column("wall_seconds", Float(53), nullable=False),
    Column("boot_seconds", Float(53), nullable=False),
    Column("boot_id", String, nullable=False),
)


class DocumentDatabase:
    """The tables of stored documents, which any number of processes may use at once.

    SQLite is for the processes of one machine; PostgreSQL for those of several. Every change is one transaction that is
    on the disk when it ends.
    """

    def __init__(self, place: Path | str | None = None) -> None:
        """Opens a database, which is created if it does not exist.

        Args:
            place: folder of a SQLite file; or the URL of a PostgreSQL database; None: in memory.

        Raises:
            InvalidConfig: a folder that cannot be written to, a file that is no database or of a later version, a URL
                that cannot be used, or a server that does not answer.
        """
        self.is_shared = place is not None
        """Whether other processes may use it, too, and it survives this one."""
        self._lock = RLock()
        """Held during a write; for a database in memory, which has one connection, during a read, too."""
        self._name = str(place) if isinstance(place, Path) else "memory" if place is None else "the database"
        url = URL.create("sqlite") if place is None else _url_of(place)
        self._reserve = place / RESERVE_NAME if isinstance(place, Path) else None
        self.is_sqlite = url.get_backend_name() == "sqlite"
        self._clock_due = 0.0
        try:
            self._engine = _open_sqlite(url) if self.is_sqlite else _open_postgresql(url)
            self._create_tables()
        except SQLAlchemyError as error:
            raise InvalidConfig(_cannot_open(place, url, error)) from None
        self._clock = self._open_clock()
        self._fill_reserve()

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds that pass evenly, also across restarts: the clock of `expires_at`."""
        return self._clock

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection that sees one state of the database.

        Raises:
            DocumentStoreUnavailable: the database does not answer.
        """
        if not self.is_shared:
            self._lock.acquire()
        try:
            with self._engine.begin() as connection:
                yield connection
        except DBAPIError as error:
            raise self._unavailable(error) from None
        finally:
            if not self.is_shared:
                self._lock.release()

    @contextmanager
    def write(self, tenant: str | None, *, is_short: bool = False, frees: bool = False) -> Iterator[Connection]:
        """The only connection that changes documents of this tenant; an error undoes all changes.

        Args:
            tenant: None: nothing of a tenant is changed.
            is_short: whether to wait for a busy database for `SHORT_SECONDS` only.
            frees: whether it makes room, and may use the reserve of a full disk.

        Raises:
            DocumentStoreUnavailable: the database does not answer, is locked for half a minute, or its disk is full.
        """
        seconds = SHORT_SECONDS if is_short else _BUSY_SECONDS
        if not self._lock.acquire(timeout=seconds):
            raise DocumentStoreUnavailable(
                f"the stored documents were being written to for {seconds:g} s; try again later"
            )
        uses_reserve = frees and self._is_full()
        try:
            if uses_reserve and self._reserve is not None:
                self._reserve.unlink(missing_ok=True)
            with self._writing(seconds).begin() as connection:
                if is_short and not self.is_sqlite:
                    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {round(seconds * 1e3)}")
                if tenant is not None:
                    self._lock_tenant(connection, tenant)
                yield connection
        except DBAPIError as error:
            raise self._unavailable(error) from None
        finally:
            if uses_reserve:
                self._shrink()
                self._fill_reserve()
            self._lock.release()

    def _is_full(self) -> bool:
        """Whether the disk of the documents has little room."""
        return self._reserve is not None and shutil.disk_usage(self._reserve.parent).free < RESERVE_BYTES

    def _fill_reserve(self) -> None:
        """Takes room on the disk that nothing but a deletion gets, as far as there is some."""
        if self._reserve is not None:
            with suppress(OSError), self._reserve.open("ab") as file:
                file.write(bytes(max(RESERVE_BYTES - file.tell(), 0)))

    def _shrink(self) -> None:
        """Gives the disk back what deleted documents took."""
        raw = self._engine.raw_connection()
        with suppress(sqlite3.Error), closing(raw):
            for pragma in ("incremental_vacuum", "wal_checkpoint(TRUNCATE)"):
                raw.cursor().execute(f"PRAGMA {pragma}").fetchall()

    def save_clock(self, *, is_short: bool = False) -> None:
        """Saves how much time has passed, if that is due."""
        if self.is_shared and self.is_sqlite and time.monotonic() >= self._clock_due:
            self._clock_due = time.monotonic() + _CLOCK_SECONDS
            self._shrink()
            with self.write(None, is_short=is_short) as connection:
                connection.execute(update(_CLOCK).values(_clock_row(self._clock())))

    def close(self) -> None:
        """Saves the clock, if the database can be written to, and closes all connections."""
        self._clock_due = 0.0
        try:
            self.save_clock(is_short=True)
        except DocumentStoreUnavailable as error:
            logger.warning("the clock of stored documents was not saved: %s", error)
        self._engine.dispose()

    def _writing(self, seconds: float) -> Engine:
        return self._engine.execution_options(kvmosaic_writes=seconds)

    def _lock_tenant(self, connection: Connection, tenant: str) -> None:
        """Creates the row of a tenant if there is none, and locks it (SQLite has one writer at a time)."""
        row = select(TENANTS.c.tenant).where(TENANTS.c.tenant == tenant).with_for_update()
        if connection.execute(row).one_or_none() is None:
            zeros = {column.name: 0 for column in TENANTS.columns if column.name != "tenant"}
            added = (sqlite if self.is_sqlite else postgresql).insert(TENANTS).values({**zeros, "tenant": tenant})
            connection.execute(added.on_conflict_do_nothing())
            connection.execute(row)

    def _create_tables(self) -> None:
        with self._lock, self._writing(_BUSY_SECONDS).begin() as connection:
            if not self.is_sqlite:  # of several servers that start at once, one creates the tables
                connection.execute(select(func.pg_advisory_xact_lock(SCHEMA_VERSION, 0x6B766D)))
            _TABLES.create_all(connection)
            if "checksum" not in {column["name"] for column in inspect(connection).get_columns(TEXTS.name)}:
                connection.exec_driver_sql(f"ALTER TABLE {TEXTS.name} ADD COLUMN checksum BIGINT")
            known = connection.execute(select(_CLOCK.c.schema_version)).scalar_one_or_none()
            if known is None:
                connection.execute(insert(_CLOCK).values(schema_version=SCHEMA_VERSION, **_clock_row(time.time())))
            elif known > SCHEMA_VERSION:
                raise InvalidConfig(
                    f"the stored documents in {self._name!r:.200} were written by a later version (schema {known}, "
                    f"this one knows {SCHEMA_VERSION}); use that version, or another folder"
                )

    def _open_clock(self) -> Callable[[], float]:
        """The saved clock and the time since: by the machine's own count, or across a reboot by the system's time."""
        with self.read() as connection:
            if self.is_sqlite:
                row = connection.execute(select(_CLOCK)).one()
                if row.boot_id and row.boot_id == _boot_id():
                    passed = _boot_seconds() - row.boot_seconds
                else:
                    passed = time.time() - row.wall_seconds
                start = row.seconds + max(passed, 0.0)
            else:  # one clock for all machines
                start = float(connection.execute(select(func.extract("epoch", func.clock_timestamp()))).scalar_one())
        begun = _boot_seconds()
        return lambda: start + _boot_seconds() - begun

    def _unavailable(self, error: DBAPIError) -> DocumentStoreUnavailable:
        return DocumentStoreUnavailable(
            f"the stored documents cannot be read or written now ({_first_line(error)}); try again, and look at the "
            "disk or the database server"
        )


def document_place(folder: str | None, url: str | None, of: Sequence[str] = ()) -> Path | str | None:
    """Where documents are stored, by the settings `documents_dir` and `documents_url`.

    Args:
        folder: a folder, or `none` for memory; None: a folder in the user's data, or memory where it cannot be created.
        url: of a PostgreSQL database, in place of a folder.
        of: files and folders whose documents have a place of their own in the user's data.

    Raises:
        InvalidConfig: both are given.
    """
    if url:
        if folder is not None:
            raise InvalidConfig(
                "documents_dir and documents_url are both set; documents are stored in one place: choose"
            )
        return url
    if folder is not None:
        return None if folder == NO_FOLDER else Path(folder).expanduser()
    usual = user_data_path("kvmosaic") / "documents"
    if of:
        names = sorted(str(Path(name).resolve()) for name in of)
        usual /= hashlib.sha256("\0".join(names).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    try:
        usual.mkdir(mode=0o700, parents=True, exist_ok=True)
        usual.chmod(0o700)
        with tempfile.TemporaryFile(dir=usual):
            return usual
    except OSError as error:
        logger.warning(
            "%s cannot be written to (%s): stored documents are in memory, and gone at the end; give --documents-dir",
            usual,
            error.strerror,
        )
        return None


def _url_of(place: Path | str) -> URL:
    if isinstance(place, Path):
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(place / FILE_NAME, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise InvalidConfig(_cannot_write(place, error.strerror or str(error))) from None
        for name in (FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"):  # SQLite creates the others like the first
            with suppress(OSError):  # there is none, or another user is its owner
                (place / name).chmod(0o600)
        return URL.create("sqlite", database=str(place.absolute() / FILE_NAME))
    try:
        url = make_url(place)
    except ArgumentError:
        raise InvalidConfig("documents_url is no URL; write it as postgresql://USER:PASSWORD@HOST/DATABASE") from None
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise InvalidConfig(
            f"documents_url begins with {url.drivername!r:.40}; write it as postgresql://USER:PASSWORD@HOST/DATABASE, "
            "or give --documents-dir for a file"
        )
    return url.set(drivername="postgresql+psycopg")


def _open_sqlite(url: URL) -> Engine:
    options: dict[str, Any] = {} if url.database else {"poolclass": StaticPool}
    connect_args = {"timeout": _BUSY_SECONDS, "check_same_thread": False}
    engine = create_engine(url, connect_args=connect_args, json_deserializer=_read_metadata, **options)

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # transactions begin below
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # of a new file
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")  # what was acknowledged is on the disk
        connection.execute("PRAGMA secure_delete=ON")  # what was deleted is not
        connection.text_factory = lambda damaged: damaged.decode(errors="replace")
        connection.create_function("lower", 1, _lower, deterministic=True)  # SQLite's own knows ASCII only

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        seconds = connection.get_execution_options().get("kvmosaic_writes")
        if seconds is not None:
            connection.exec_driver_sql(f"PRAGMA busy_timeout={round(seconds * 1e3)}")
        connection.exec_driver_sql("BEGIN" if seconds is None else "BEGIN IMMEDIATE")

    return engine


def _read_metadata(text: str) -> Any:
    """Reads JSON; where it is damaged, it hides no other row."""
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        return {"damaged": "the metadata cannot be read; store it again"}


def _lower(text: Any) -> Any:
    return text.lower() if isinstance(text, str) else text


def _open_postgresql(url: URL) -> Engine:
    try:
        connect_args = {"connect_timeout": 10, "application_name": "kvmosaic"} | _NETWORK_LIMITS
        return create_engine(url, pool_pre_ping=True, connect_args=connect_args)
    except ModuleNotFoundError:
        raise InvalidConfig(f"documents_url needs the package psycopg; {pip_install('postgres')}") from None


def _cannot_open(place: Path | str | None, url: URL, error: SQLAlchemyError) -> str:
    reason = _first_line(error)
    if isinstance(place, Path):
        if "not a database" in reason or "malformed" in reason:
            return (
                f"{str(place / FILE_NAME)!r:.300} is damaged or no database ({reason}); restore it from a copy, or "
                "move it away to begin anew"
            )
        return _cannot_write(place, reason)
    return f"the database at {url.render_as_string(hide_password=True)!r:.300} cannot be used: {reason}"


def _cannot_write(folder: Path, reason: str) -> str:
    return (
        f"the folder of stored documents is {str(folder)!r:.200}, which cannot be written to ({reason}); give "
        "--documents-dir (KVMOSAIC_DOCUMENTS_DIR) a folder of which this user is the owner, or 'none' for memory"
    )


def _first_line(error: SQLAlchemyError) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    return (str(cause).strip().splitlines() or [type(error).__name__])[0][:300]


def _clock_row(seconds: float) -> dict[str, Any]:
    """What is saved of the clock when it shows `seconds`."""
    return {
        "seconds": seconds,
        "wall_seconds": time.time(),
        "boot_seconds": _boot_seconds(),
        "boot_id": _boot_id(),
    }


def _boot_seconds() -> float:
    """Seconds that only count up; where the system can tell (Linux), time that it sleeps counts, too."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def _boot_id() -> str:
    """Name of this run of the machine; empty: unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
