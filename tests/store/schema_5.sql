BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('5');
CREATE TABLE begun_directories (
	directory TEXT NOT NULL, 
	begun_at FLOAT NOT NULL, 
	PRIMARY KEY (directory)
);
CREATE TABLE checkpoints (
	tinker_path TEXT NOT NULL, 
	model_id TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	name TEXT NOT NULL, 
	directory TEXT NOT NULL, 
	base_model TEXT NOT NULL, 
	architecture TEXT NOT NULL, 
	lora_config JSON NOT NULL, 
	has_optimizer BOOLEAN NOT NULL, 
	size_bytes INTEGER NOT NULL, 
	user_metadata JSON, 
	created_at FLOAT NOT NULL, 
	expires_at FLOAT, 
	public BOOLEAN DEFAULT 0 NOT NULL, 
	PRIMARY KEY (tinker_path)
);
CREATE TABLE command_images (
	command_id INTEGER NOT NULL, 
	sha256 BLOB NOT NULL, 
	size INTEGER NOT NULL, 
	PRIMARY KEY (command_id, sha256), 
	FOREIGN KEY(command_id) REFERENCES commands (id) ON DELETE CASCADE
);
CREATE TABLE commands (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	model_id TEXT NOT NULL, 
	seq_id INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	payload BLOB, 
	image_digests BLOB, 
	digest BLOB, 
	status TEXT NOT NULL, 
	created_at FLOAT NOT NULL, 
	finished_at FLOAT, 
	result BLOB, 
	result_type TEXT, 
	error TEXT, 
	category TEXT, 
	resolved JSON, 
	kept_bytes INTEGER, 
	UNIQUE (model_id, seq_id), 
	FOREIGN KEY(model_id) REFERENCES models (model_id)
);
CREATE TABLE discarded_directories (
	directory TEXT NOT NULL, 
	discarded_at FLOAT NOT NULL, 
	PRIMARY KEY (directory)
);
CREATE TABLE models (
	model_id TEXT NOT NULL, 
	session_id TEXT NOT NULL, 
	base_model TEXT NOT NULL, 
	lora_config JSON NOT NULL, 
	optimizer_config JSON NOT NULL, 
	user_metadata JSON, 
	status TEXT NOT NULL, 
	created_at FLOAT NOT NULL, 
	applied_seq INTEGER, 
	PRIMARY KEY (model_id), 
	FOREIGN KEY(session_id) REFERENCES sessions (session_id)
);
CREATE TABLE sampling_sessions (
	sampling_session_id TEXT NOT NULL, 
	session_id TEXT NOT NULL, 
	base_model TEXT NOT NULL, 
	snapshot_id TEXT, 
	model_path TEXT, 
	model_id TEXT, 
	gone TEXT, 
	created_at FLOAT NOT NULL, 
	inflight BOOLEAN DEFAULT 0 NOT NULL, 
	clones INTEGER DEFAULT '0' NOT NULL, 
	PRIMARY KEY (sampling_session_id), 
	FOREIGN KEY(session_id) REFERENCES sessions (session_id), 
	FOREIGN KEY(model_id) REFERENCES models (model_id)
);
CREATE TABLE sessions (
	session_id TEXT NOT NULL, 
	tags JSON NOT NULL, 
	user_metadata JSON, 
	sdk_version TEXT NOT NULL, 
	project_id TEXT, 
	display_name TEXT, 
	created_at FLOAT NOT NULL, 
	last_seen_at FLOAT NOT NULL, 
	finished_at FLOAT, 
	finish_reason TEXT, 
	finish_detail TEXT, 
	PRIMARY KEY (session_id)
);
CREATE INDEX ix_sessions_created_at ON sessions (created_at);
CREATE INDEX ix_checkpoints_expires_at ON checkpoints (expires_at);
CREATE INDEX ix_checkpoints_directory ON checkpoints (directory);
CREATE INDEX ix_checkpoints_model_id ON checkpoints (model_id);
CREATE INDEX ix_models_session_id ON models (session_id);
CREATE INDEX ix_sampling_sessions_session_id ON sampling_sessions (session_id);
CREATE INDEX ix_commands_done ON commands (finished_at) WHERE status = 'done';
CREATE INDEX ix_commands_queued ON commands (model_id, seq_id) WHERE status = 'queued';
CREATE INDEX ix_commands_kept ON commands (id, kept_bytes) WHERE kept_bytes IS NOT NULL;
CREATE INDEX ix_command_images_sha256 ON command_images (sha256);
COMMIT;
