//! Figures as a drawing: bandwidth over the size of buffers, each series beside its reference.

use dmalane::validate::Figure;
use plotters::prelude::*;

use super::Outcome;
use super::report::series;
use crate::size::binary;

/// Width and height in pixels.
const SIZE: (u32, u32) = (1000, 600);

/// The drawing as SVG: a line for each memory, direction and page size, and a thin one for its reference.
pub fn svg(outcome: &Outcome) -> Result<String, String> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        draw(&area, outcome).map_err(|e| e.to_string())?;
        area.present().map_err(|e| e.to_string())?;
    }
    Ok(text)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Error<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

fn draw<'a>(area: &Area<'a>, outcome: &Outcome) -> Result<(), Error<'a>> {
    area.fill(&WHITE)?;
    let figures = &outcome.report.figures;
    let log = |bytes: u64| (bytes as f64).log2();
    let rates = figures.iter().flat_map(|f| [Some(f.total()), f.reference]).flatten();
    let most = rates.fold(1.0, f64::max) / 1e9 * 1.1;
    let (first, last) = figures
        .iter()
        .map(|f| log(f.buffer))
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), x| (a.min(x), b.max(x)));
    let (first, last) = if figures.is_empty() { (12.0, 13.0) } else { (first - 0.5, last + 0.5) };
    let mut chart = ChartBuilder::on(area)
        .caption(&outcome.device, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(80)
        .build_cartesian_2d(first..last, 0.0..most)?;
    chart
        .configure_mesh()
        .x_desc("buffer")
        .y_desc("GB/s (10^9 bytes per second)")
        .x_label_formatter(&|x| binary(x.exp2().round() as u64))
        .y_label_formatter(&|y| crate::size::giga(y * 1e9))
        .draw()?;
    let mut names: Vec<String> = figures.iter().map(name).collect();
    names.dedup();
    names.sort();
    names.dedup();
    for (i, name_of) in names.iter().enumerate() {
        let color = Palette99::pick(i).to_rgba();
        let these: Vec<&Figure> = figures.iter().filter(|f| name(f) == *name_of).collect();
        let points = |get: fn(&Figure) -> Option<f64>| {
            these.iter().filter_map(|f| Some((log(f.buffer), get(f)? / 1e9))).collect::<Vec<_>>()
        };
        let rates = points(|f| Some(f.total()));
        chart
            .draw_series(LineSeries::new(rates.iter().copied(), color.stroke_width(2)).point_size(3))?
            .label(name_of)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
        chart.draw_series(LineSeries::new(points(|f| f.reference), color.mix(0.4).stroke_width(1)).point_size(2))?;
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK).draw()
}

fn name(f: &Figure) -> String {
    series(f.phase, f.directions, f.pages)
}
