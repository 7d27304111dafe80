//! Names that were meant.

/// The word that was meant, if one is like it: by few letters that were added, left out, changed or exchanged.
pub fn nearest<'a>(word: &str, among: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let near = among.map(|other| (distance(word, other), other)).filter(|(n, other)| *n > 0 && *n <= other.len() / 3);
    near.min().map(|(_, other)| other)
}

/// Letters to add, leave out, change or exchange with the next to make one of the other.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut rows = vec![(0..=b.len()).collect::<Vec<usize>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let changed = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let exchanged = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            let exchanged = if exchanged { rows[i - 2][j - 2] + 1 } else { changed };
            row.push(changed.min(exchanged).min(row[j - 1] + 1).min(rows[i - 1][j] + 1));
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}
