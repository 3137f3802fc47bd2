"""The recording of a slot's first iteration, as its process makes it: begun before it, ended after it, written beside
training. What is in it, and what a joiner does with it: recording.py.
"""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from migration.communicators.recorded import RecordingGroup
from migration.recording import Recorder, Recording, recording_path, save_recording

if TYPE_CHECKING:
    from migration.groups import Groups
    from migration.job import IterationResult
    from migration.options import Options
    from migration.timeline import Timeline


class SlotRecording:
    """Of this process's slot, if --warm-up recorded asks for it and none is there yet."""

    def __init__(self, groups: Groups, timeline: Timeline, options: Options) -> None:
        self._groups, self._timeline, self._options = groups, timeline, options
        self._end: Callable[[IterationResult], None] | None = None

    def begin(self, slot: int, *, from_seeds: bool) -> None:
        """From now on the slot's calls are recorded."""
        if self._options.warm_up != "recorded" or recording_path(self._options.run, slot).exists():
            return
        recorder = Recorder(slot, self._options.record_limit_mib << 20, from_seeds=from_seeds)
        undo = self._groups.replace(lambda handle: RecordingGroup(handle, handle.inner, recorder))

        def end(result: IterationResult) -> None:
            undo()
            recording = recorder.finish(result.loss, result.grad_norm)
            threading.Thread(target=self._save, args=(recording,), name="recording", daemon=True).start()

        self._end = end

    def end(self, result: IterationResult) -> None:
        """An iteration is done: the first one ends the recording."""
        if self._end is not None:
            self._end(result)
            self._end = None

    def drop(self) -> None:
        """The iteration came to nothing, and its groups are gone."""
        self._end = None

    def _save(self, recording: Recording) -> None:
        """Beside training. Where it fails the log says so, and a joiner that waits for the file says that."""
        try:
            with self._timeline.span("save_recording", "TRAINING", slot=recording.slot) as span:
                save_recording(recording, recording_path(self._options.run, recording.slot))
                span.bytes = recording.kept_bytes
            self._timeline.add_event("recording", recording.describe())
        except OSError as error:
            self._timeline.add_event("error", f"slot {recording.slot}: its recording can't be written: {error}")
