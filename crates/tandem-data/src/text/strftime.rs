//! `strftime_now` of chat templates: the current date in a given format, in UTC.
//!
//! A date crate would not replace this: chrono and jiff reject unknown codes, which Python keeps,
//! and have codes of their own (`%+`, `%.f`), which Python has not.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Formats the current time.
///
/// The token cache is keyed by content, not by date. A data set keeps the date of its tokenisation,
/// so a resumed run sees the same tokens.
pub(crate) fn strftime_now(format: &str) -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    strftime(seconds, format)
}

/// Formats seconds since 1970 by the codes that templates use; an unknown code stays as it is.
fn strftime(seconds: u64, format: &str) -> String {
    let days = seconds / 86_400;
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let weekday = DAYS[((days + 4) % 7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let january_first = days_before(year, 1) + 1;
    let mut out = String::new();
    let mut codes = format.chars();
    while let Some(c) = codes.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = codes.next();
        // `%-d` and similar codes print no leading zero.
        let plain = code == Some('-');
        if plain {
            code = codes.next();
        }
        let two = |n: u64| if plain { n.to_string() } else { format!("{n:02}") };
        out.push_str(&match code {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('H') => two(hour),
            Some('I') => two((hour + 11) % 12 + 1),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
            Some('B') => month_name.into(),
            Some('b' | 'h') => month_name[..3].into(),
            Some('A') => weekday.into(),
            Some('a') => weekday[..3].into(),
            Some('j') => format!("{:03}", days + 2 - january_first),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".into(),
            Some('%') => "%".into(),
            Some(other) => format!("%{}{other}", if plain { "-" } else { "" }),
            None => "%".into(),
        });
    }
    out
}

/// Returns year, month and day of a day counted from 1970-01-01.
fn civil(days: u64) -> (u64, u64, u64) {
    let mut year = 1970 + days / 366;
    while days_before(year + 1, 1) <= days {
        year += 1;
    }
    let month = (1..=12).rev().find(|&m| days_before(year, m) <= days).unwrap_or(1);
    (year, month, days - days_before(year, month) + 1)
}

/// Returns the days from 1970-01-01 to the first of a month.
fn days_before(year: u64, month: u64) -> u64 {
    const BEFORE: [u64; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    let leaps = |y: u64| y / 4 - y / 100 + y / 400;
    let leap_year = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let leap_day = u64::from(leap_year && month > 2);
    (year - 1970) * 365 + leaps(year - 1) - leaps(1969) + BEFORE[month as usize - 1] + leap_day
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected texts are `datetime.fromtimestamp(s, timezone.utc).strftime(f)` of CPython 3.11.
    #[test]
    fn dates_are_formatted_as_in_python() {
        let format = "%d %b %Y|%A %B %-d|%H:%M:%S %I %p|%j %y %F %T %%";
        let cases = [
            (0, "01 Jan 1970|Thursday January 1|00:00:00 12 AM|001 70 1970-01-01 00:00:00 %"),
            (951_827_696, "29 Feb 2000|Tuesday February 29|12:34:56 12 PM|060 00 2000-02-29 12:34:56 %"),
            (1_735_689_599, "31 Dec 2024|Tuesday December 31|23:59:59 11 PM|366 24 2024-12-31 23:59:59 %"),
            (1_735_689_600, "01 Jan 2025|Wednesday January 1|00:00:00 12 AM|001 25 2025-01-01 00:00:00 %"),
            (4_107_542_400, "01 Mar 2100|Monday March 1|00:00:00 12 AM|060 00 2100-03-01 00:00:00 %"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(strftime(seconds, format), expected);
        }
    }
}
