"""The load generator: how many receivers one sender serves, measured over HTTP beside what users do today."""
