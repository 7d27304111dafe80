//! Several measurements of the same device as one: the median of each figure, and its spread.

use dmalane::validate::{Figure, ValidateReport};

/// The least and the greatest rate of a figure over several measurements, both directions together.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Spread {
    /// Bytes per second.
    pub least: f64,
    /// Bytes per second.
    pub greatest: f64,
}

/// The report of several: the last, where one failed; else each figure is that of the measurement in which its rate is
/// the median, and has a spread.
pub fn median(mut reports: Vec<ValidateReport>) -> (ValidateReport, Vec<Spread>) {
    let Some(mut last) = reports.pop() else { return (ValidateReport::default(), Vec::new()) };
    if !last.passed() || reports.iter().any(|report| report.figures.len() != last.figures.len()) {
        return (last, Vec::new());
    }
    let mut spreads = Vec::new();
    for (i, figure) in last.figures.iter_mut().enumerate() {
        let mut all: Vec<&Figure> = reports.iter().map(|report| &report.figures[i]).collect();
        all.push(figure);
        all.sort_by(|a, b| a.total().total_cmp(&b.total()));
        spreads.push(Spread { least: all[0].total(), greatest: all[all.len() - 1].total() });
        *figure = all[(all.len() - 1) / 2].clone();
    }
    (last, spreads)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dmalane::dma::PageKind;
    use dmalane::validate::{Directions, Pages, Phase, Rate};
    use std::time::Duration;

    #[test]
    fn each_figure_has_its_own_median() {
        let figure = |rate| {
            let time = Duration::from_micros(1);
            let read = Some(Rate { bytes_per_s: rate, p50: time, p99: time, buffers: 1 });
            let (phase, buffer, pages, kind) = (Phase::Ddr, 4096, Pages::Small, PageKind::Base);
            Figure { phase, buffer, pages, kind, directions: Directions::Read, read, write: None, reference: None }
        };
        let report = |rates: [f64; 2]| ValidateReport { figures: rates.map(figure).to_vec(), ..Default::default() };
        let (all, spreads) = median([[1.0, 9.0], [3.0, 8.0], [2.0, 7.0]].map(report).to_vec());
        assert_eq!(all.figures.iter().map(Figure::total).collect::<Vec<_>>(), [2.0, 8.0]);
        assert_eq!(spreads, [Spread { least: 1.0, greatest: 3.0 }, Spread { least: 7.0, greatest: 9.0 }]);
        let short = ValidateReport { figures: vec![figure(5.0)], ..Default::default() };
        assert_eq!(median(vec![report([1.0, 1.0]), short.clone()]), (short, Vec::new()));
    }
}
