"""One row for every optimizer class of `fusestep.nn`: for tests, benchmark and documents."""

from .adam import ROWS_OF_ADAM
from .elementwise import ELEMENTWISE_ROWS
from .layerwise import LAYERWISE_ROWS
from .record import ELSEWHERE, Argument, Form, Measured, Options, Row, Source
from .row_wise import ROW_WISE_ROWS

ROWS: dict[str, Row] = {
    row.name: row for row in (*ROWS_OF_ADAM, *ELEMENTWISE_ROWS, *ROW_WISE_ROWS, *LAYERWISE_ROWS)
}

__all__ = ["ELSEWHERE", "ROWS", "Argument", "Form", "Measured", "Options", "Row", "Source"]
