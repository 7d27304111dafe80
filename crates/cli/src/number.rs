//! Numbers on the command line that are not whole.

use std::time::Duration;

/// Returns a parser of seconds from `least` to an hour.
pub fn seconds(least: f64) -> impl Fn(&str) -> Result<Duration, String> + Clone + Send + Sync + 'static {
    move |text| match text.parse() {
        Ok(seconds) if (least..=3600.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(format!("not a number of seconds from {least} to 3600, such as 0.5")),
    }
}
