"""What is known of load: monitors, samples, views by which policies decide, links."""
