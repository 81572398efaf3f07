//! Memory-mapped tokenised data set.

use std::path::{Path, PathBuf};

use tandem_files::Map;

use crate::cache::cache_file::{Header, RowEntry};
use crate::error::DataError;
use crate::place::{Place, Places};
use crate::report::Report;
use crate::rows::tokens::{PairTokens, RowCounts, ScoredTokens, UnpairedTokens};
use crate::source::record::RowKind;

/// Extension of the file with the lines of the rows.
pub(crate) const PLACES: &str = "places";

/// Rows of a data set as token ids, in file order, created by [`prepare`](crate::prepare::prepare).
/// Processes that open the same cache share its memory. Methods that take a row panic if it does not
/// exist or is of another kind.
#[derive(Debug)]
pub struct TokenCache {
    map: Map,
    header: Header,
    report: Report,
    path: PathBuf,
    places: Places,
    built: bool,
}

impl TokenCache {
    /// Maps a finished cache file and verifies its checksums. The inner error says why the file is
    /// invalid and must be rebuilt.
    pub(crate) fn open(
        path: &Path,
        key: &blake3::Hash,
        files: Vec<PathBuf>,
    ) -> Result<Result<Self, String>, DataError> {
        let file = tandem_files::open(path).map_err(DataError::io("opening", path))?;
        let length = file.metadata().map_err(DataError::io("reading", path))?.len();
        if length == 0 {
            return Ok(Err("it is empty".into()));
        }
        let header = match Header::verify(&file, length).map_err(DataError::io("reading", path))? {
            Ok(header) => header,
            Err(reason) => return Ok(Err(reason.into())),
        };
        let beside = path.with_extension(PLACES);
        let places = Places::read(&beside, key, &header.header_checksum, files);
        let places = match places.map_err(DataError::io("reading", &beside))? {
            Ok(places) => places,
            Err(reason) => return Ok(Err(reason.into())),
        };
        let map = Map::new(file).map_err(DataError::io("mapping", path))?;
        let Some([_, _, report, end]) = header.offsets() else {
            return Ok(Err("its header is damaged".into()));
        };
        match serde_json::from_slice(&map[report..end]) {
            Ok(report) => {
                Ok(Ok(Self { map, header, report, path: path.to_path_buf(), places, built: false }))
            }
            Err(e) => Ok(Err(format!("its report cannot be read: {e}"))),
        }
    }

    /// Marks the cache as built by this call.
    pub(crate) fn just_built(self) -> Self {
        Self { built: true, ..self }
    }

    /// Checks that all rows were there that were read so far.
    ///
    /// # Errors
    /// The file has become shorter meanwhile; rows of zeroes were read.
    pub fn check(&self) -> Result<(), DataError> {
        self.map.check().map_err(DataError::io("reading", &self.path))
    }

    /// Returns the kind of rows.
    pub fn kind(&self) -> RowKind {
        self.header.kind()
    }

    /// Returns the number of rows, including repetitions by weight.
    pub fn num_rows(&self) -> usize {
        self.header.num_rows as usize
    }

    /// Returns row `i` of a preference data set.
    pub fn pair(&self, i: usize) -> PairTokens<'_> {
        assert!(
            matches!(self.kind(), RowKind::Preference | RowKind::Reward),
            "pair() of {:?} rows",
            self.kind()
        );
        let row = self.rows()[i];
        let words = &self.words()[row.start as usize..];
        let (prompt, words) = words.split_at(row.prompt as usize);
        let (chosen, words) = words.split_at(row.chosen as usize);
        let unseen = row.unseen.map(|n| n as usize);
        PairTokens { prompt, unseen, chosen, rejected: &words[..row.rejected as usize] }
    }

    /// Returns the margin of row `i`; 0 except in rows for reward models.
    pub fn margin(&self, i: usize) -> f32 {
        let row = self.rows()[i];
        let end = row.start as usize + (row.prompt + row.chosen + row.rejected) as usize;
        if self.kind() == RowKind::Reward { f32::from_bits(self.words()[end]) } else { 0.0 }
    }

    /// Returns row `i` of a data set of labelled completions.
    pub fn unpaired(&self, i: usize) -> UnpairedTokens<'_> {
        assert_eq!(self.kind(), RowKind::Unpaired, "unpaired() of other rows");
        let row = self.rows()[i];
        let (prompt, words) = self.words()[row.start as usize..].split_at(row.prompt as usize);
        let (completion, words) = words.split_at(row.chosen as usize);
        UnpairedTokens { prompt, completion, label: words[0] != 0 }
    }

    /// Returns row `i` of a supervised data set.
    pub fn scored(&self, i: usize) -> ScoredTokens<'_> {
        assert_eq!(self.kind(), RowKind::Supervised, "scored() of other rows");
        let row = self.rows()[i];
        let (tokens, marks) = self.words()[row.start as usize..].split_at(row.chosen as usize);
        ScoredTokens { tokens, scored: &bytemuck::cast_slice(marks)[..tokens.len()] }
    }

    /// Returns row `i` of a data set of prompts: its ids and the JSON of its row.
    pub fn prompt(&self, i: usize) -> (&[u32], &[u8]) {
        assert_eq!(self.kind(), RowKind::Prompt, "prompt() of other rows");
        let row = self.rows()[i];
        let (tokens, json) = self.words()[row.start as usize..].split_at(row.prompt as usize);
        (tokens, &bytemuck::cast_slice(json)[..row.chosen as usize])
    }

    /// Returns the tokens of row `i` that an answer would follow: a prompt whole, of a supervised row the tokens
    /// before its last stretch of scored ones.
    pub fn prompt_tokens(&self, i: usize) -> &[u32] {
        if self.kind() == RowKind::Prompt {
            return self.prompt(i).0;
        }
        let ScoredTokens { tokens, scored } = self.scored(i);
        let end = scored.iter().rposition(|&mark| mark != 0).map_or(0, |last| last + 1);
        &tokens[..scored[..end].iter().rposition(|&mark| mark == 0).map_or(0, |before| before + 1)]
    }

    /// Returns the number of tokens that row `i` adds to a forest; a prompt counts alone.
    pub fn num_tokens(&self, i: usize, share_prefix: bool) -> usize {
        let row = self.rows()[i];
        match self.kind() {
            RowKind::Prompt => return row.prompt as usize,
            RowKind::Unpaired => return (row.prompt + row.chosen) as usize,
            RowKind::Preference | RowKind::Reward | RowKind::Supervised => {}
        }
        let unseen = row.unseen.iter().sum::<u32>() as usize;
        let both = 2 * row.prompt as usize + row.chosen as usize + row.rejected as usize - unseen;
        if share_prefix { both - row.shared as usize } else { both }
    }

    /// Returns the sizes that row `i` adds to a forest.
    pub fn counts(&self, i: usize, share_prefix: bool) -> RowCounts {
        match self.kind() {
            RowKind::Supervised => self.scored(i).counts(),
            RowKind::Prompt => {
                let tokens = self.num_tokens(i, share_prefix);
                RowCounts { tokens, scored_rows: 0, trees: 1, sequence_tokens: tokens as u64 }
            }
            RowKind::Unpaired => {
                let row = self.rows()[i];
                RowCounts::for_answers(row.prompt as usize, &[row.chosen as usize], share_prefix)
            }
            // Lengths suffice; the ids are not read.
            RowKind::Preference | RowKind::Reward => {
                let row = self.rows()[i];
                let counts = RowCounts::for_pair(
                    row.unseen.map(|unseen| (row.prompt - unseen) as usize),
                    [row.chosen, row.rejected].map(|n| n as usize),
                    row.shared as usize,
                    share_prefix,
                );
                // In a reward model's row both ends are scored, even if equal responses share one.
                let scored_rows = if self.kind() == RowKind::Reward { 2 } else { counts.scored_rows };
                RowCounts { scored_rows, ..counts }
            }
        }
    }

    /// Returns file and line of row `i`.
    pub fn origin(&self, i: usize) -> Place {
        self.places.place(self.rows()[i].row)
    }

    /// Returns the data set's files.
    pub fn files(&self) -> &[PathBuf] {
        self.places.files()
    }

    /// Returns the rows that were dropped or changed.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Returns the report in lines, with file names.
    pub fn report_lines(&self) -> Vec<String> {
        self.report.lines(&self.places)
    }

    /// Returns a hash of the tokens: equal for equal rows, whatever the files' format and place.
    pub fn content_hash(&self) -> blake3::Hash {
        self.header.content_hash()
    }

    /// Returns whether this call tokenised, instead of finding the cache on disk.
    pub fn was_built(&self) -> bool {
        self.built
    }

    /// Returns the cache file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn words(&self) -> &[u32] {
        let [data, rows, ..] = self.sections();
        bytemuck::cast_slice(&self.map[data..rows])
    }

    fn rows(&self) -> &[RowEntry] {
        let [_, rows, report, _] = self.sections();
        bytemuck::cast_slice(&self.map[rows..report])
    }

    fn sections(&self) -> [usize; 4] {
        self.header.offsets().expect("checked when opened")
    }
}
