//! The picture of `dmalane top` on a terminal.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Gauge, Paragraph, Row, Sparkline, Table, TableState, Wrap};
use ratatui::{DefaultTerminal, Frame};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use super::watch::{CLIENT_ALIGN, CLIENT_HEAD, JOB_HEAD, JobView, STAGE_HEAD, View, Watcher, job_row, stage_row};
use crate::failure::Failure;
use crate::size::per_second;

/// The longest time until a signal or a new picture is seen.
const LOOK: Duration = Duration::from_millis(50);
/// Rates that are remembered of a job or daemon.
const HISTORY: usize = 240;

/// Shows pictures until a key or a signal ends it. The terminal is as before then, after a panic too.
pub fn run(watch: Watcher, interval: Duration) -> Result<ExitCode, Failure> {
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        signal_hook::flag::register_usize(number, signal.clone(), number as usize)?;
    }
    let (views, pictures) = channel();
    let (_running, ended) = channel();
    // A job or a daemon that does not answer must not keep keys from being read.
    std::thread::spawn(move || look(watch, interval, &views, &ended));
    let cannot = |e: io::Error| {
        Failure::because("cannot use this terminal", &e)
            .hint("dmalane top --once prints text, --json a line for each interval")
    };
    let mut terminal = ratatui::try_init().map_err(cannot)?;
    let result = Screen::default().run(&mut terminal, &pictures, &signal);
    ratatui::try_restore().map_err(cannot)?;
    result.map_err(cannot)?;
    Ok(match signal.load(Ordering::Relaxed) {
        0 => ExitCode::SUCCESS,
        signal => ExitCode::from(128 + signal as u8),
    })
}

/// Looks once in each interval, until nobody wants to see it.
fn look(mut watch: Watcher, interval: Duration, views: &Sender<View>, ended: &Receiver<()>) {
    while views.send(watch.look()).is_ok() {
        if ended.recv_timeout(interval) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

#[derive(Default)]
struct Screen {
    view: Option<View>,
    /// The rates of each job and daemon, in bytes per second.
    history: HashMap<String, VecDeque<u64>>,
    /// The job or daemon that is chosen, by name; the first if it is gone.
    chosen: String,
    hidden: bool,
}

impl Screen {
    fn run(
        &mut self,
        terminal: &mut DefaultTerminal,
        pictures: &Receiver<View>,
        signal: &AtomicUsize,
    ) -> io::Result<()> {
        let mut dirty = true;
        while signal.load(Ordering::Relaxed) == 0 {
            while let Ok(view) = pictures.try_recv() {
                self.see(view);
                dirty = true;
            }
            if dirty {
                terminal.draw(|frame| self.draw(frame))?;
            }
            dirty = event::poll(LOOK)?;
            if dirty && !self.react(&event::read()?) {
                break;
            }
        }
        Ok(())
    }

    fn see(&mut self, view: View) {
        let jobs = view.jobs.iter().map(|job| {
            let rate = job.answer.as_ref().map_or(0.0, |r| if r.now.bytes { r.rate } else { 0.0 });
            (job.name.clone(), rate)
        });
        let rates: Vec<_> = jobs.chain(view.daemons.iter().map(|d| (d.socket.clone(), d.rate()))).collect();
        self.history.retain(|name, _| rates.iter().any(|(known, _)| known == name));
        for (name, rate) in rates {
            let history = self.history.entry(name).or_default();
            history.push_back(rate as u64);
            if history.len() > HISTORY {
                history.pop_front();
            }
        }
        self.view = Some(view);
    }

    /// The names of what can be chosen.
    fn names(&self) -> Vec<String> {
        let Some(view) = &self.view else { return Vec::new() };
        view.jobs.iter().map(|job| job.name.clone()).chain(view.daemons.iter().map(|d| d.socket.clone())).collect()
    }

    /// Does what a key asks for; false ends the program.
    fn react(&mut self, event: &Event) -> bool {
        let Event::Key(KeyEvent { code, modifiers, kind: KeyEventKind::Press, .. }) = event else { return true };
        let names = self.names();
        let at = names.iter().position(|name| *name == self.chosen).unwrap_or(0);
        let step = |to: usize| names.get(to.min(names.len().saturating_sub(1))).cloned().unwrap_or_default();
        match code {
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Down | KeyCode::Char('j') => self.chosen = step(at + 1),
            KeyCode::Up | KeyCode::Char('k') => self.chosen = step(at.saturating_sub(1)),
            KeyCode::Enter => self.hidden = !self.hidden,
            _ => {}
        }
        true
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let names = self.names();
        let at = names.iter().position(|name| *name == self.chosen).unwrap_or(0);
        let lines = names.len().clamp(1, usize::from(frame.area().height / 3).max(1)) as u16;
        let [head, list, details, foot] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(lines + 1),
            Constraint::Fill(1),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        let Some(view) = &self.view else {
            return frame.render_widget(Paragraph::new("dmalane top"), head);
        };
        let count = |n: usize, what: &str| crate::layout::count(n, what);
        let title = match view.daemons.len() {
            0 => count(view.jobs.len(), "command"),
            n => format!("{}, {}", count(view.jobs.len(), "command"), count(n, "daemon")),
        };
        frame.render_widget(Line::from(vec![Span::styled("dmalane top", strong()), format!("  {title}").into()]), head);
        show(frame, "q end   up, down choose   Enter details", foot);
        if names.is_empty() {
            return show(frame, "No command of this user is running", list);
        }
        let daemon = |d: &super::watch::DaemonView| {
            let (done, command) = (String::new(), format!("dmalaned at {}", d.socket));
            match &d.status {
                Ok(status) => {
                    let (rate, time) = (per_second(d.rate()), super::watch::clock(status.uptime as f64));
                    ["-".to_owned(), count(status.clients.len(), "client"), done, rate, time, command]
                }
                Err(why) => ["-".to_owned(), why.clone(), done.clone(), done.clone(), done, command],
            }
        };
        let rows = view.jobs.iter().map(job_row).chain(view.daemons.iter().map(daemon));
        let mut state = TableState::new().with_selected(Some(at));
        let chosen = Style::new().add_modifier(Modifier::REVERSED);
        let jobs = table(JOB_HEAD, rows, "rlrrrl").row_highlight_style(chosen);
        frame.render_stateful_widget(jobs, list, &mut state);
        if self.hidden {
            return;
        }
        let history = self.history.get(&names[at]).map_or(Vec::new(), |rates| rates.iter().copied().collect());
        match (view.jobs.get(at), view.daemons.get(at.saturating_sub(view.jobs.len()))) {
            (Some(job), _) => draw_job(frame, details, job, &history),
            (None, Some(daemon)) => {
                let [about, clients, rates] =
                    Layout::vertical([Constraint::Length(4), Constraint::Fill(1), Constraint::Length(5)])
                        .areas(details);
                let text = Paragraph::new(format!("\n{}", daemon.text())).wrap(Wrap { trim: true });
                frame.render_widget(text, about);
                frame.render_widget(table(CLIENT_HEAD, daemon.client_rows().into_iter(), CLIENT_ALIGN), clients);
                draw_history(frame, rates, &history);
            }
            (None, None) => {}
        }
    }
}

/// The details of a job.
fn draw_job(frame: &mut Frame<'_>, area: Rect, job: &JobView, history: &[u64]) {
    let running = match &job.answer {
        Ok(running) => running,
        Err(why) => return show(frame, format!("\nThe job has given {why}"), area),
    };
    let device = running.device();
    let [_, gauge, stages, queues, rates] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(if running.stages.is_empty() { 0 } else { running.stages.len() as u16 + 2 }),
        Constraint::Length(u16::from(device.is_some())),
        Constraint::Fill(1),
    ])
    .areas(area);
    match running.share() {
        Some(share) => {
            let bar = Gauge::default().ratio(share).label(running.progress()).gauge_style(coloured(Color::Blue));
            frame.render_widget(bar, gauge);
        }
        None => show(frame, running.progress(), gauge),
    }
    frame.render_widget(table(STAGE_HEAD, running.stages.iter().map(stage_row), "lrrrrr"), stages);
    show(frame, device.unwrap_or_default(), queues);
    if running.now.bytes {
        draw_history(frame, rates, history);
    }
}

/// Rates as bars, the newest at the right.
fn draw_history(frame: &mut Frame<'_>, area: Rect, history: &[u64]) {
    let [label, bars] = Layout::vertical([Constraint::Length(1), Constraint::Max(8)]).areas(area);
    let shown = &history[history.len().saturating_sub(usize::from(bars.width))..];
    let most = shown.iter().copied().max().unwrap_or(0);
    show(frame, format!("rate, at most {}", per_second(most as f64)), label);
    frame.render_widget(Sparkline::default().data(shown).style(coloured(Color::Green)), bars);
}

/// Text, of which nothing is seen where there is no room.
fn show<'a>(frame: &mut Frame<'_>, text: impl Into<Text<'a>>, area: Rect) {
    frame.render_widget(Paragraph::new(text), area);
}

/// A table whose columns are as wide as what is in them; the last one takes the rest.
fn table<'a, const N: usize>(head: [&'a str; N], rows: impl Iterator<Item = [String; N]>, align: &str) -> Table<'a> {
    let rows: Vec<_> = rows.collect();
    let width = |i: usize| rows.iter().map(|row| row[i].chars().count()).chain([head[i].len()]).max().unwrap_or(0);
    let right = |i: usize| align.as_bytes().get(i) == Some(&b'r');
    let cell = |(i, text): (usize, String)| {
        let line = Line::from(text);
        Cell::from(if right(i) { line.right_aligned() } else { line })
    };
    let cells = |row: [String; N]| Row::new(row.into_iter().enumerate().map(cell));
    let widths: Vec<_> = (0..N).map(|i| Constraint::Length(width(i) as u16)).collect();
    let header = cells(head.map(str::to_owned)).style(strong());
    Table::new(rows.iter().cloned().map(cells), widths).header(header).column_spacing(2)
}

fn strong() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

/// A colour, or none where `NO_COLOR` is set.
fn coloured(colour: Color) -> Style {
    match std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty()) {
        true => Style::new(),
        false => Style::new().fg(colour),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    #[test]
    fn it_is_drawn_at_any_size() {
        let mut screens = vec![Screen::default()];
        for view in View::examples() {
            let mut screen = Screen::default();
            (0..3).for_each(|_| screen.see(view.clone()));
            screens.push(screen);
        }
        let key = |code| Event::Key(KeyEvent::new(code, KeyModifiers::NONE));
        for screen in &mut screens {
            for (i, (width, height)) in
                [1, 2, 5, 20, 80, 157].into_iter().flat_map(|w| (1..14).chain([30]).map(move |h| (w, h))).enumerate()
            {
                let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
                terminal.draw(|frame| screen.draw(frame)).unwrap();
                let code = [KeyCode::Down, KeyCode::Enter, KeyCode::Up, KeyCode::Down][i % 4];
                assert!(screen.react(&key(code)));
            }
            assert!(!screen.react(&key(KeyCode::Char('q'))) && !screen.react(&key(KeyCode::Esc)));
        }
    }
}
