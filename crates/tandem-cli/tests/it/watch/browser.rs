//! The pages in Chromium, through ChromeDriver. WebDriver takes a hundred lines over the HTTP client that is
//! there anyway; its crates would bring asynchronous clients of their own.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::page::Watch;
use super::{append, line, write_run};
use crate::workshop::{Workshop, skip};

/// Longest wait for something on a page.
const PATIENCE: Duration = Duration::from_secs(30);

/// A Chromium without a window.
struct Browser {
    driver: Child,
    session: String,
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = ureq::delete(&self.session).call();
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

impl Browser {
    /// Starts one that is `size` large and light or dark; `None`, said aloud, without ChromeDriver.
    fn start(size: [u32; 2], is_dark: bool) -> Option<Self> {
        let program = std::env::var_os("TANDEM_TEST_CHROMEDRIVER").unwrap_or_else(|| "chromedriver".into());
        let started =
            Command::new(program).arg("--port=0").stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let Ok(mut driver) = started else {
            skip("chromedriver is not installed (Debian: chromium-driver)");
            return None;
        };
        let mut lines = BufReader::new(driver.stdout.take().expect("piped")).lines();
        let port = lines.by_ref().find_map(|line| {
            let line = line.expect("text");
            Some(line.split_once("successfully on port ")?.1.trim_end_matches('.').to_owned())
        });
        std::thread::spawn(move || lines.for_each(drop));
        let root = format!("http://127.0.0.1:{}/session", port.expect("it names its port"));
        let [width, height] = size;
        let mut arguments = vec![
            "--headless=new".to_owned(),
            "--no-sandbox".to_owned(),
            "--disable-dev-shm-usage".to_owned(),
            "--hide-scrollbars".to_owned(),
            format!("--window-size={width},{height}"),
        ];
        arguments.extend(is_dark.then(|| "--force-dark-mode".to_owned()));
        let mut options = json!({ "args": arguments });
        // A window cannot be as narrow as a phone.
        if width < 700 {
            options["mobileEmulation"] =
                json!({ "deviceMetrics": { "width": width, "height": height, "pixelRatio": 2 } });
        }
        let capabilities = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": { "browser": "ALL", "performance": "ALL" },
        } } });
        let answer = send(&root, &capabilities);
        let id = answer["sessionId"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned();
        Some(Self { driver, session: format!("{root}/{id}") })
    }

    fn command(&self, name: &str, body: &Value) -> Value {
        send(&format!("{}/{name}", self.session), body)
    }

    fn open(&self, address: &str) {
        self.command("url", &json!({ "url": address }));
    }

    /// Value of a JavaScript expression on the page.
    fn value(&self, expression: &str) -> Value {
        self.command("execute/sync", &json!({ "script": format!("return {expression}"), "args": [] }))
    }

    /// Waits until an expression is true.
    fn wait(&self, expression: &str) {
        let began = Instant::now();
        while self.value(expression) != true {
            assert!(
                began.elapsed() < PATIENCE,
                "still not: {expression}\n{}",
                self.value("document.body.innerText")
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Complaints of the page.
    fn complaints(&self) -> Vec<Value> {
        self.command("se/log", &json!({ "type": "browser" })).as_array().expect("a list").clone()
    }

    /// Addresses that pages have asked for so far.
    fn requests(&self) -> Vec<String> {
        let log = self.command("se/log", &json!({ "type": "performance" }));
        let event = |entry: &Value| -> Option<String> {
            let event: Value = serde_json::from_str(entry["message"].as_str()?).ok()?;
            let is_request = event["message"]["method"] == "Network.requestWillBeSent";
            is_request.then(|| event["message"]["params"]["request"]["url"].as_str().map(str::to_owned))?
        };
        log.as_array().expect("a list").iter().filter_map(event).collect()
    }

    /// Fails unless the pages drew curves, ran nothing of the data's, kept to themselves and to `own`.
    #[track_caller]
    fn expect_good_page(&self, own: &str) {
        assert_eq!(self.value("document.querySelectorAll('figure svg polyline').length > 15"), true);
        assert_eq!(self.value("document.querySelectorAll('[data-room] script:not([type])').length"), 0);
        assert_eq!(self.value("document.title !== 'hacked'"), true);
        assert_eq!(
            self.value("document.body.innerText.includes(\"<script>document.title='hacked'</script>\")"),
            true
        );
        let (complaints, requests) = (self.complaints(), self.requests());
        assert!(complaints.is_empty(), "{complaints:#?}");
        assert!(
            !requests.is_empty() && requests.iter().all(|address| address.starts_with(own)),
            "{requests:?}"
        );
        assert_eq!(
            self.value("document.documentElement.scrollWidth <= window.innerWidth"),
            true,
            "no sideways scrolling"
        );
    }
}

fn send(address: &str, body: &Value) -> Value {
    let agent =
        ureq::Agent::new_with_config(ureq::Agent::config_builder().http_status_as_error(false).build());
    let mut response = agent.post(address).send(body.to_string()).expect("ChromeDriver answers");
    let text = response.body_mut().with_config().limit(64 << 20).read_to_string().expect("text");
    let mut answer: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
    assert_eq!(response.status(), 200, "{address}: {answer}");
    answer["value"].take()
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn the_page_draws_and_goes_on_with_the_run() {
    let Some(browser) = Browser::start([1280, 900], false) else { return };
    let shop = Workshop::new();
    let run = shop.path("run");
    write_run(&run, 50);
    let watch = Watch::start(&shop, &["run"]);
    let address = format!("http://{}/", watch.address());
    browser.open(&address);
    browser.wait("document.querySelectorAll('figure svg').length > 15");
    browser.wait("document.getElementById('note').textContent === 'live'");
    browser.value("document.querySelectorAll('details').forEach((details) => { details.open = true })");
    append(&run, &(51..=60).map(line).collect::<String>());
    browser.wait("document.querySelector('[data-room=runs]').innerText.includes('step 60')");
    // The pointer reads values, and a box hides its run.
    let move_to = "document.querySelector('[data-panel=\"curve loss\"] svg').dispatchEvent(new PointerEvent('pointermove', \
                   { bubbles: true, clientX: 200 }))";
    browser.value(move_to);
    let read = browser.value("document.querySelector('[data-panel=\"curve loss\"] output').textContent");
    let (step, value) = read.as_str().unwrap().split_once(':').expect("a step and a value");
    let expected: Value = serde_json::from_str(&line(step.parse().expect("a step"))).unwrap();
    let (value, loss) = (value.parse::<f64>().expect("a number"), expected["loss"].as_f64().unwrap());
    assert!((value - loss).abs() < 1e-4, "{value} at step {step}, {loss} in the file");
    browser.value("document.querySelector('[data-run]').click()");
    let display =
        "getComputedStyle(document.querySelector('figure svg polyline[stroke=\"#0B0000\"]')).display";
    assert_eq!(browser.value(display), "none");
    append(&run, &line(61));
    browser.wait("document.querySelector('[data-room=runs]').innerText.includes('step 61')");
    assert_eq!(
        browser.value("document.querySelector('[data-run]').checked"),
        false,
        "an update leaves it hidden"
    );
    browser.expect_good_page(&address);
}

#[test]
#[ignore = "long: runs in .ci/nightly"]
fn a_report_opens_from_disk_on_every_screen() {
    let shop = Workshop::new();
    write_run(&shop.path("run"), 60);
    write_run(&shop.path("other"), 40);
    shop.run(&["report", "run", "other"]).expect(0);
    let address = format!("file://{}", shop.path("report.html").display());
    for (size, is_dark) in [([1280, 900], false), ([1280, 900], true), ([390, 844], false)] {
        let Some(browser) = Browser::start(size, is_dark) else { return };
        browser.open(&address);
        browser.value("document.querySelectorAll('details').forEach((details) => { details.open = true })");
        browser.expect_good_page("file://");
        let columns =
            "getComputedStyle(document.querySelector('.curves')).gridTemplateColumns.split(' ').length";
        assert_eq!(
            browser.value(&format!("({columns} === 1) === {}", size[0] < 700)),
            true,
            "one column on a phone"
        );
        assert_eq!(browser.value("matchMedia('(prefers-color-scheme: dark)').matches"), is_dark);
    }
}

/// Prints the times that `docs/watch.md` gives.
#[test]
#[ignore = "long: runs in .ci/nightly"]
fn ten_thousand_steps_are_drawn() {
    let Some(browser) = Browser::start([1280, 900], false) else { return };
    let shop = Workshop::new();
    write_run(&shop.path("run"), 10_000);
    shop.run(&["report", "run"]).expect(0);
    browser.open(&format!("file://{}", shop.path("report.html").display()));
    let drawn = "performance.getEntriesByName('first-contentful-paint')[0]";
    browser.wait(&format!("document.readyState === 'complete' && {drawn} !== undefined"));
    let paint = browser.value(&format!("{drawn}.startTime"));
    println!("a report of 10,000 steps: first paint after {paint} ms");
    let watch = Watch::start(&shop, &["run"]);
    browser.open(&format!("http://{}/", watch.address()));
    browser.wait("document.querySelectorAll('figure svg').length > 15");
    let since = browser.value("performance.now()");
    let place = browser.value("document.body.dataset.milliseconds");
    println!(
        "a live page of 10,000 steps: there within {since} ms of opening; {place} ms of them to place all curves"
    );
    assert_eq!(
        browser.value("document.querySelector('[data-room=runs]').innerText.includes('step 10000')"),
        true
    );
}
