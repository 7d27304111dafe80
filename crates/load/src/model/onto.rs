//! Parts of tensors, and reading them into memory of a device, through its staging buffers.

use std::ops::Range;
use std::sync::PoisonError;

use dmalane_queue::{DeviceAddr, QueueAddr};

use super::expected::compared;
use super::file::ModelFile;
use super::reader::Reader;
use crate::container::Tensor;
use crate::device::OpenDevice;
use crate::error::Error;
use crate::fill::{FillError, Watch};
use crate::manifest::{Compared, check};
use crate::parts::{Places, Runs, add_run};
use crate::read::{ReadFiles, ReadTo, read};

/// A part of a tensor, and its place in a buffer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// The tensor.
    pub name: String,
    /// Which of its bytes.
    pub bytes: Range<u64>,
    /// Offset in the buffer of the first one.
    pub to: u64,
}

impl Part {
    /// The bytes of the file that it is, of a tensor in which it must lie.
    pub(super) fn within(&self, tensor: &Tensor) -> Result<Range<u64>, Error> {
        let Range { start, end } = self.bytes;
        if start > end || end > tensor.len {
            let message = format!("{start}..{end} does not lie within the {} bytes of {:?}", tensor.len, self.name);
            return Err(Error::BadSlice(message));
        }
        Ok(tensor.at.bits() + start..tensor.at.bits() + end)
    }
}

/// A part of a file, where its first byte goes, and the number of the tensor that it is all of.
type Piece = (Range<u64>, DeviceAddr, Option<usize>);

/// Reads parts of tensors, of which `find` has the files and numbers, to their places behind `place` on a device.
pub(super) fn read_parts(
    reader: &Reader,
    find: impl Fn(&str) -> Result<(usize, usize), Error>,
    device: &mut OpenDevice,
    place: DeviceAddr,
    parts: &[Part],
    watch: &mut Watch<'_>,
) -> Result<(), Error> {
    device.check_process()?;
    let (mut files, mut pieces) = (Vec::new(), Vec::<Vec<Piece>>::new());
    // Parts of one file follow each other.
    let mut last = None;
    for part in parts {
        let (file, tensor) = find(&part.name)?;
        let of = &reader.files[file];
        let range = part.within(&of.contents().tensors[tensor])?;
        let whole = part.bytes == (0..of.contents().tensors[tensor].len);
        if !whole {
            of.check_parts()?;
        }
        of.check_rows()?;
        let to =
            place.advance(part.to).filter(|to| range.is_empty() || to.advance(range.end - range.start - 1).is_some());
        let to = to.ok_or_else(|| Error::BadSlice(format!("{:?} ends behind the last device address", part.name)))?;
        if range.is_empty() {
            continue;
        }
        let known = last.filter(|n| files[*n] == file).or_else(|| files.iter().position(|known| *known == file));
        let n = known.unwrap_or(files.len());
        if n == files.len() {
            files.push(file);
            pieces.push(Vec::new());
        }
        pieces[n].push((range, to, whole.then_some(tensor)));
        last = Some(n);
    }
    let files: Vec<&ModelFile> = files.into_iter().map(|file| &reader.files[file]).collect();
    for (file, pieces) in files.iter().zip(&mut pieces) {
        pieces.sort_by_key(|(range, ..)| range.start);
        if let Some(pair) = pieces.windows(2).find(|pair| pair[0].0.end > pair[1].0.start) {
            let (path, at) = (file.path().display(), pair[1].0.start);
            return Err(Error::BadSlice(format!("{path}: two parts have the byte at {at}: read one after the other")));
        }
    }
    if files.is_empty() {
        return Ok(());
    }
    let runs = |(file, pieces): (&&ModelFile, &Vec<Piece>)| {
        let mut runs = Runs::new();
        pieces.iter().for_each(|(range, to, _)| add_run(&mut runs, range.clone(), *to));
        (file.contents().len, runs)
    };
    let places = Places::new(files.iter().zip(&pieces).map(runs));
    let mut ranges: Vec<Vec<Compared<'_>>> = Vec::new();
    for (buffer, (file, pieces)) in files.iter().zip(&pieces).enumerate() {
        let whole = pieces.iter().filter_map(|(range, _, tensor)| tensor.map(|tensor| (range, tensor)));
        let at = |range: &Range<u64>| places.parts.offset(buffer, range.start);
        let placed = whole.map(|(range, n)| (*file, n, at(range), at(range) + (range.end - range.start)));
        ranges.push(compared(placed));
    }
    let sources = files.iter().map(|file| file.open()).collect::<Result<Vec<_>, _>>()?;
    sources.iter().try_for_each(|source| device.refuse_own(&source.path, || source.metadata()))?;
    let (options, mut watch) = (reader.options(&ranges), reader.while_open(watch));
    // What the limit leaves is for the staging buffers, and no less than they take at least.
    let (least, most) = device.staging.bounds();
    let staging = (reader.budget.limit() - reader.budget.used()).clamp(least, most);
    let _charge = reader.budget.take(None, staging)?;
    let to = ReadTo::Device(device, &places, staging);
    let done = read(to, &sources, places.parts.job(), &options, &mut watch, true);
    let ReadFiles { filled, methods } = done.map_err(|error| match error {
        Error::Fill(error @ FillError::Transfer { .. }) => {
            places.parts.describe(error, |file| (files[file].path().to_owned(), Some(&**files[file].contents())))
        }
        other => other,
    })?;
    check(&ranges, filled.gone.iter().map(|digests| &**digests))?;
    let mut reads = reader.reads.lock().unwrap_or_else(PoisonError::into_inner);
    reads.add(filled.report, files.iter().map(|file| file.path().to_owned()).zip(methods));
    Ok(())
}
